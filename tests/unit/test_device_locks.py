"""Device locks: one owner for each device of a host, and a line for those who wait."""

import json
import os
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine import ConfigError, EngineConfig
from engine.backends.device_files import expected_device
from flows import device_locks
from flows.cli import app
from flows.device_locks import DeviceLocks
from flows.device_names import device_names, is_exclusive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def one(folder: Path) -> DeviceLocks:
    return DeviceLocks(folder, "one")


@pytest.fixture
def other(folder: Path) -> DeviceLocks:
    return DeviceLocks(folder, "other")


def make_config(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": "m"} | values)


def test_a_device_has_one_owner_until_it_is_released(one: DeviceLocks, other: DeviceLocks) -> None:
    hold = one.try_take(("npu:0",))
    assert hold is not None
    assert other.try_take(("npu:0",)) is None
    assert other.try_take(("npu:1",)) is not None
    hold.release()
    hold.release()
    assert other.try_take(("npu:0",)) is not None


def test_devices_are_taken_together_or_not_at_all(one: DeviceLocks, other: DeviceLocks) -> None:
    hold = one.try_take(("npu:1",))
    assert hold is not None
    assert other.try_take(("npu:0", "npu:1")) is None
    assert one.try_take(("npu:0",)) is not None


def test_shared_devices_need_no_file(one: DeviceLocks, folder: Path) -> None:
    assert one.try_take(()) is not None
    assert not one.is_wanted(())
    assert not folder.exists()


def test_who_came_first_is_served_first(one: DeviceLocks, other: DeviceLocks, folder: Path) -> None:
    late = DeviceLocks(folder, "late")
    hold = one.try_take(("npu:0",))
    second, third = other.line_up(("npu:0",)), late.line_up(("npu:0", "npu:1"))
    assert hold is not None
    hold.release()
    assert late.try_take(("npu:0",), third) is None
    hold = other.try_take(("npu:0",), second)
    assert hold is not None
    second.leave()
    hold.release()
    assert late.try_take(("npu:0",), third) is not None


def test_nobody_overtakes_the_line_for_a_device_that_has_just_become_free(
    one: DeviceLocks, other: DeviceLocks
) -> None:
    ticket = other.line_up(("npu:0",))
    assert one.try_take(("npu:0",)) is None
    assert one.try_take(("npu:1",)) is not None
    ticket.leave()
    assert one.try_take(("npu:0",)) is not None


def test_the_owner_sees_that_others_wait_but_not_itself(
    one: DeviceLocks, other: DeviceLocks
) -> None:
    own = one.line_up(("npu:1",))
    assert not one.is_wanted(("npu:0", "npu:1"), own)
    ticket = other.line_up(("npu:1", "npu:2"))
    assert one.is_wanted(("npu:0", "npu:1"), own)
    assert not one.is_wanted(("npu:0",), own)
    ticket.leave()
    assert not one.is_wanted(("npu:0", "npu:1"), own)


def test_the_place_of_a_process_that_died_is_removed(
    one: DeviceLocks, other: DeviceLocks, folder: Path
) -> None:
    ticket = other.line_up(("npu:0",))
    os.close(ticket._descriptor)  # what the kernel does
    assert not one.is_wanted(("npu:0",))
    assert one.try_take(("npu:0",)) is not None
    assert list(folder.glob("*.waiting")) == []


def test_a_message_says_who_has_the_device_and_since_when(
    one: DeviceLocks, other: DeviceLocks
) -> None:
    hold = one.try_take(("npu:0", "npu:1"))
    today = time.strftime("%Y-%m-%d")
    assert other.describe(("npu:1", "npu:2")).startswith(
        f"device npu:1, held by process {os.getpid()} of job one since {today} "
    )
    assert hold is not None
    hold.release()
    ticket = one.line_up(("npu:1",))
    assert other.describe(("npu:1",)).startswith(
        f"device npu:1, for which process {os.getpid()} of job one since {today} "
    )
    ticket.leave()
    assert other.describe(("npu:1",)) == "device npu:1"


def test_owners_and_the_line_can_be_listed(
    one: DeviceLocks, other: DeviceLocks, folder: Path
) -> None:
    assert (one.owners(), one.waiting()) == ([], [])
    hold = one.try_take(("npu:0", "npu:1"))
    tickets = [DeviceLocks(folder, name).line_up(("npu:1",)) for name in ("b", "a")]
    assert [(claim.job_id, claim.devices) for claim in other.owners()] == [
        ("one", ("npu:0", "npu:1"))
    ]
    assert [claim.job_id for claim in other.waiting()] == ["b", "a"]
    assert hold is not None
    hold.release()
    for ticket in tickets:
        ticket.leave()
    assert (one.owners(), one.waiting()) == ([], [])


def test_the_command_shows_who_has_which_device(
    one: DeviceLocks, other: DeviceLocks, folder: Path
) -> None:
    command = ["devices", "--lock-dir", str(folder)]
    free = CliRunner().invoke(app, command)
    assert (free.exit_code, free.stdout) == (0, "")
    hold, ticket = one.try_take(("npu:0", "npu:1")), other.line_up(("npu:1",))
    assert "npu:0 npu:1" in CliRunner().invoke(app, command).stdout
    facts = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [(f["state"], f["job_id"], f["devices"], f["pid"]) for f in facts] == [
        ("held", "one", ["npu:0", "npu:1"], os.getpid()),
        ("waiting", "other", ["npu:1"], os.getpid()),
    ]
    assert hold is not None
    ticket.leave()


def test_an_owner_that_has_not_written_its_name_yet_is_an_owner(
    one: DeviceLocks, other: DeviceLocks, folder: Path
) -> None:
    hold = one.try_take(("npu:0",))
    assert hold is not None
    os.truncate(folder / "npu-0.lock", 0)
    assert other.describe(("npu:0",)) == "device npu:0, held by an unknown process"


def test_a_lock_on_a_file_that_a_cleaner_has_removed_is_none(
    one: DeviceLocks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device_locks._try_flock

    def removed_meanwhile(descriptor: int, kind: int) -> bool:
        (folder / "npu-0.lock").unlink(missing_ok=True)
        return real(descriptor, kind)

    with monkeypatch.context() as patched:
        patched.setattr(device_locks, "_try_flock", removed_meanwhile)
        assert one.try_take(("npu:0",)) is None
    assert one.try_take(("npu:0",)) is not None


def test_every_user_of_the_host_can_use_the_files_but_remove_only_its_own(
    one: DeviceLocks, folder: Path
) -> None:
    before = os.umask(0o077)
    try:
        hold, ticket = one.try_take(("npu:0",)), one.line_up(("npu:1",))
    finally:
        os.umask(before)
    assert hold is not None
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {".lock": 0o666, ".waiting": 0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    ticket.leave()


def test_a_folder_that_cannot_be_used_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    locks = DeviceLocks(tmp_path / "file" / "locks", "job")
    with pytest.raises(ConfigError, match=r"file/locks cannot be used: .*set device_lock_dir"):
        locks.try_take(("npu:0",))
    with pytest.raises(ConfigError, match="set device_lock_dir"):
        locks.line_up(("npu:0",))


def test_a_link_is_not_followed(one: DeviceLocks, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "precious").write_text("keep")
    (folder / "npu-0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="npu-0.lock"):
        one.try_take(("npu:0",))
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.parametrize(
    ("device", "visible", "names"),
    [
        ("npu", "", ("npu:0", "npu:1")),
        ("npu", "6, 4", ("npu:6", "npu:4")),
        ("npu", "6", ("npu:6", "npu:1")),
        ("cuda", "GPU-8f2,GPU-aa1", ("cuda:GPU-8f2", "cuda:GPU-aa1")),
        ("mock", "6,4", ("mock:0", "mock:1")),
    ],
)
def test_a_device_has_one_name_whichever_devices_a_process_may_see(
    device: str, visible: str, names: tuple[str, ...]
) -> None:
    config = make_config(device=device, device_ids=[1, 0])
    variables = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert device_names(config, dict.fromkeys(variables, visible)) == names


def test_accelerators_are_for_one_engine_at_a_time() -> None:
    exclusive = {
        device: is_exclusive(make_config(device=device))
        for device in ("auto", "cpu", "cuda", "npu", "mock")
    }
    assert exclusive == {"auto": False, "cpu": False, "cuda": True, "npu": True, "mock": False}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([], "cpu"),
        (["davinci_manager", "nvidiactl"], "cpu"),
        (["nvidia0", "nvidiactl"], "cuda"),
        (["davinci3", "nvidia0"], "npu"),
    ],
)
def test_auto_locks_the_accelerator_that_has_device_files(
    tmp_path: Path, files: list[str], kind: str
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    assert expected_device("auto", tmp_path) == kind
    assert expected_device("mock", tmp_path) == "mock"


def test_auto_has_the_name_of_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.device_names.expected_device", lambda device: "npu")
    config = make_config(device="auto")
    assert is_exclusive(config)
    assert device_names(config, {"ASCEND_RT_VISIBLE_DEVICES": "5"}) == ("npu:5",)
