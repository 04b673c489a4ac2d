"""The limit of Prefect that counts a host's devices, against a client that answers as its does."""

import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
)
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from terminal import Ended, Terminal

from engine import ExitCode, Finding
from flows import device_commands, device_limit
from flows.device_limit import PrefectDeviceLimit
from flows.device_queue import LimitReachedError

NAME = f"tokenmill-devices-{socket.gethostname()}"


class FakeServer:
    """One limit, as Prefect's server counts it; `get_client` opens a client."""

    def __init__(self) -> None:
        self.limit: SimpleNamespace | None = None
        self.leases: dict[UUID, int] = {}
        self.error: Exception | None = None
        self.opened: list[tuple[object, int]] = []

    def make_limit(self, limit: int, active_slots: int = 0, *, active: bool = True) -> None:
        self.limit = SimpleNamespace(limit=limit, active_slots=active_slots, active=active)

    @contextmanager
    def get_client(self, *, httpx_settings: object, sync_client: bool) -> Iterator["FakeServer"]:
        assert sync_client
        self.opened.append((httpx_settings, PREFECT_CLIENT_MAX_RETRIES.value()))
        if self.error is not None:
            raise self.error
        yield self

    def read_global_concurrency_limit_by_name(self, name: str) -> SimpleNamespace:
        assert name == NAME
        if self.limit is None:
            raise ObjectNotFound(_status_error(404))
        return SimpleNamespace(**vars(self.limit))

    def create_global_concurrency_limit(self, new: GlobalConcurrencyLimitCreate) -> None:
        assert new.name == NAME
        assert self.limit is None
        self.make_limit(new.limit)

    def update_global_concurrency_limit(
        self, name: str, update: GlobalConcurrencyLimitUpdate
    ) -> None:
        assert name == NAME
        vars(self.limit).update(update.model_dump(exclude_unset=True))

    def increment_concurrency_slots_with_lease(
        self, names: list[str], slots: int, mode: str, lease_duration: float
    ) -> SimpleNamespace:
        assert (names, mode, lease_duration) == ([NAME], "concurrency", 60.0)
        assert self.limit is not None
        if slots > self.limit.limit:
            raise _status_error(422)
        if self.limit.active_slots + slots > self.limit.limit:
            raise _status_error(423)
        self.limit.active_slots += slots
        lease_id = uuid4()
        self.leases[lease_id] = slots
        return SimpleNamespace(json=lambda: {"lease_id": str(lease_id)})

    def renew_concurrency_lease(self, lease_id: UUID, lease_duration: float) -> None:
        assert lease_duration == 60.0
        if lease_id not in self.leases:
            raise _status_error(410)

    def release_concurrency_slots_with_lease(self, lease_id: UUID) -> None:
        assert self.limit is not None
        self.limit.active_slots -= self.leases.pop(lease_id)


def _status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://prefect/api")
    return httpx.HTTPStatusError(
        f"error {code}", request=request, response=httpx.Response(code, request=request)
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(device_limit, "get_client", server.get_client)
    return server


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device_limit, "time", clock)
    return clock


class TestSlots:
    """What a run does with the limit of its host."""

    def test_slots_are_taken_renewed_and_given_back_by_their_lease(
        self, server: FakeServer
    ) -> None:
        server.make_limit(4)
        limit = PrefectDeviceLimit()
        lease_id = limit.take(2, 0)
        assert lease_id is not None
        assert server.leases == {lease_id: 2}
        limit.renew(lease_id)
        limit.give_back(lease_id)
        assert vars(server.limit) == {"limit": 4, "active_slots": 0, "active": True}
        # A client of Prefect tries again for a minute, and its calls may take as long.
        assert server.opened == [({"timeout": 5.0}, 0)] * 3

    @pytest.mark.parametrize(
        ("num_slots", "allowed", "expected"),
        [
            (1, 2, f"1 slot(s) of Prefect's limit {NAME}: 2 of 2 are in use"),
            (1, 0, f"1 slot(s) of Prefect's limit {NAME}: 2 of 0 are in use"),
            (2, 1, f"2 slot(s) of Prefect's limit {NAME}: 2 of 1 are in use"),
        ],
    )
    def test_a_limit_that_is_reached_or_lowered_below_what_is_asked_says_its_numbers(
        self, server: FakeServer, num_slots: int, allowed: int, expected: str
    ) -> None:
        server.make_limit(allowed, active_slots=2)
        with pytest.raises(LimitReachedError) as caught:
            PrefectDeviceLimit().take(num_slots, 2)
        assert str(caught.value) == expected

    def test_a_limit_that_is_switched_off_takes_no_slots(self, server: FakeServer) -> None:
        server.make_limit(1, active_slots=1, active=False)
        assert PrefectDeviceLimit().take(1, 1) is None
        assert server.leases == {}

    def test_without_a_limit_there_are_no_slots_and_one_line_says_so(
        self, server: FakeServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "flows")
        limit = PrefectDeviceLimit()
        assert [limit.take(1, 0), limit.take(1, 0)] == [None, None]
        assert [NAME in record.getMessage() for record in caplog.records] == [True]

    def test_another_answer_of_the_server_is_no_full_limit(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.make_limit(1)
        with pytest.raises(httpx.HTTPStatusError, match="410"):
            PrefectDeviceLimit().renew(uuid4())

        def fail(*_: object) -> None:
            raise _status_error(500)

        monkeypatch.setattr(server, "increment_concurrency_slots_with_lease", fail)
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            PrefectDeviceLimit().take(1, 0)


class TestLeak:
    """Slots that a server has forgotten to take back from one that is gone."""

    @pytest.fixture
    def limit(
        self, server: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> PrefectDeviceLimit:
        # Prefect's settings take their time, and there are hours to wait.
        monkeypatch.setattr(device_limit, "_client", partial(nullcontext, server))
        return PrefectDeviceLimit()

    def wait(
        self, limit: PrefectDeviceLimit, clock: Clock, *, seconds: float, num_in_use: int
    ) -> UUID | None:
        """Ask every five seconds, as one that waits; return the lease if it gets one."""
        for _ in range(int(seconds // 5)):
            try:
                return limit.take(1, num_in_use)
            except LimitReachedError:
                clock.now += 5.0
        return None

    def test_more_slots_than_locked_devices_for_two_leases_are_set_right(
        self,
        server: FakeServer,
        limit: PrefectDeviceLimit,
        clock: Clock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        server.make_limit(4, active_slots=4)
        started = clock.now
        assert self.wait(limit, clock, seconds=600, num_in_use=3) is not None
        assert clock.now - started == 120.0
        assert vars(server.limit) == {"limit": 4, "active_slots": 4, "active": True}
        (warning,) = caplog.records
        assert warning.levelname == "WARNING"
        assert f"limit {NAME} has counted more devices" in warning.getMessage()
        assert warning.getMessage().endswith(": 4, set right to 3")

    def test_a_lowered_limit_is_no_leak(
        self,
        server: FakeServer,
        limit: PrefectDeviceLimit,
        clock: Clock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        server.make_limit(1, active_slots=2)
        assert self.wait(limit, clock, seconds=600, num_in_use=2) is None
        server.make_limit(1, active_slots=1)
        assert self.wait(limit, clock, seconds=600, num_in_use=2) is None
        assert caplog.records == []

    def test_what_comes_right_by_itself_is_no_leak(
        self, server: FakeServer, limit: PrefectDeviceLimit, clock: Clock
    ) -> None:
        server.make_limit(2, active_slots=2)
        for _ in range(5):  # each of a lease that ends
            assert self.wait(limit, clock, seconds=100, num_in_use=1) is None
            assert self.wait(limit, clock, seconds=10, num_in_use=2) is None
        assert server.limit is not None
        assert server.limit.active_slots == 2

    def test_two_looks_with_nobody_waiting_between_them_are_no_leak(
        self, server: FakeServer, limit: PrefectDeviceLimit, clock: Clock
    ) -> None:
        server.make_limit(2, active_slots=2)
        assert self.wait(limit, clock, seconds=10, num_in_use=1) is None
        clock.now += 3600.0
        assert self.wait(limit, clock, seconds=10, num_in_use=1) is None


class TestSetup:
    """`tokenmill setup-devices` as a shell sees it."""

    @pytest.fixture
    def setup(
        self,
        server: FakeServer,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> Iterator[Callable[..., Ended]]:
        terminal = Terminal(monkeypatch, capfd)
        with temporary_settings({PREFECT_API_URL: "http://prefect/api"}):
            yield partial(terminal, "setup-devices", "--lock-dir", str(tmp_path / "locks"))

    def find(self, monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
        def probe(*, timeout_seconds: float) -> list[Finding]:
            return list(findings)

        monkeypatch.setattr(device_commands, "probe_devices", probe)

    def test_it_makes_the_folder_for_all_users_and_a_limit_of_the_accelerators_found(
        self,
        setup: Callable[..., Ended],
        server: FakeServer,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        self.find(
            monkeypatch,
            Finding.ok("device", "cpu (192 threads): 700.0 of 754.0 GiB free"),
            Finding.ok("device", "npu:0 (Ascend910B3): 60.9 of 61.3 GiB free"),
            Finding.warning("device", "npu 1 is held by pid 7", "wait for it, or end it"),
        )
        ended = setup()
        assert (ended.code, vars(server.limit)) == (
            0, {"limit": 2, "active_slots": 0, "active": True},
        )  # fmt: skip
        assert ended.err == (
            f"locks: {tmp_path}/locks, mode 1777\nlimit: {NAME} is new, with 2 slots\n"
        )
        assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o1777

    def test_a_limit_that_an_operator_has_lowered_is_changed_only_by_a_number_given(
        self, setup: Callable[..., Ended], server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.find(monkeypatch, *[Finding.ok("device", f"npu:{i}") for i in range(8)])
        server.make_limit(3, active_slots=2, active=False)
        ended = setup()
        assert f"limit: {NAME} was there: 2 of 3 slots are in use, and is switched off" in ended.err
        ended = setup("--num-devices", "8")
        assert f"limit: {NAME} has 8 slots now instead of 3" in ended.err
        assert vars(server.limit) == {"limit": 8, "active_slots": 2, "active": False}

    @pytest.mark.parametrize(
        ("findings", "reason"),
        [
            ([Finding.ok("device", "cpu (2 threads): 3.0 of 4.0 GiB free")], "none is found"),
            (
                [Finding.ok("device", "npu:0"), Finding.error("devices", "npu gave no answer")],
                "npu gave no answer",
            ),
        ],
    )
    def test_accelerators_that_cannot_be_counted_are_to_be_told(
        self,
        setup: Callable[..., Ended],
        server: FakeServer,
        monkeypatch: pytest.MonkeyPatch,
        findings: list[Finding],
        reason: str,
    ) -> None:
        self.find(monkeypatch, *findings)
        ended = setup()
        assert ended.code == ExitCode.USER_MUST_ACT
        assert (
            f"cannot be counted: {reason}; say how many there are with --num-devices" in ended.err
        )
        assert server.limit is None

    def test_without_a_server_in_the_settings_it_says_how_to_have_one(
        self, setup: Callable[..., Ended]
    ) -> None:
        with temporary_settings(restore_defaults={PREFECT_API_URL}):
            ended = setup("--num-devices", "1")
        assert ended.code == ExitCode.USER_MUST_ACT
        assert "`prefect server start`" in ended.err
        assert "`prefect config set PREFECT_API_URL=" in ended.err

    @pytest.mark.parametrize("error", [httpx.ConnectError("no route"), _status_error(401)])
    def test_a_server_that_does_not_answer_is_the_users_to_mend(
        self, setup: Callable[..., Ended], server: FakeServer, error: Exception
    ) -> None:
        server.error = error
        ended = setup("--num-devices", "1")
        assert ended.code == ExitCode.USER_MUST_ACT
        assert f"the limit {NAME} cannot be set up, Prefect's server says: {error};" in ended.err
