"""Numbers of devices: what ASCEND_RT_VISIBLE_DEVICES leaves, and who holds what."""

import pytest

from engine.backends.npu_devices import VisibleDevices, check_chip, parse_holders
from engine.errors import ConfigError

# As npu-smi prints it on a machine with 910B cards; a name may be blank.
TABLE = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4               | OK            | 93.2        49                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          2847 / 32768         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4242          | python                   | 29116                   |
| 0       0                 | 4243          |                          | 134                     |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
| 3       1                 | 55115         | python3                  | 1024                    |
"""
IN_CONTAINER = (
    "| NPU     Chip       | Process id    | Process name| Process memory(MB) |Process id in container|\n"
    "| 2       0          | 990011        | python      | 512                | 77                    |\n"
)


def visible(text: str | None) -> VisibleDevices:
    return VisibleDevices.of({} if text is None else {"ASCEND_RT_VISIBLE_DEVICES": text})


@pytest.mark.parametrize(
    ("text", "physical_ids"),
    [("4", (4,)), ("1,3,8", (1, 3, 8)), ("1, 2,3", (1,)), ("1,2,-1,3", (1, 2)), ("npu0", ())],
)
def test_visible_devices_are_read_as_cann_reads_them(text: str, physical_ids: tuple[int, ...]):
    assert visible(text).physical_ids == physical_ids


def test_bound_device_is_named_by_both_numbers():
    assert visible("4,6").describe(1, "Ascend910B4") == (
        "npu 1 (Ascend910B4, npu 6 of the machine by ASCEND_RT_VISIBLE_DEVICES=4,6)"
    )
    assert visible(None).describe(6, "Ascend910B4") == "npu 6 (Ascend910B4)"


def test_id_of_the_machine_is_refused_with_the_id_to_write_instead():
    with pytest.raises(ConfigError) as caught:
        visible("4,6").check(6, count=2)
    message = str(caught.value)
    assert "engine.device_ids has 6" in message
    assert "ASCEND_RT_VISIBLE_DEVICES=4,6" in message
    assert "0 is npu 4, 1 is npu 6" in message
    assert "write 1 in engine.device_ids for npu 6" in message


def test_space_that_ends_the_list_is_pointed_at():
    with pytest.raises(ConfigError, match="no spaces") as caught:
        visible("4, 6").check(1, count=1)
    assert "reads no further than '4'" in str(caught.value)


def test_id_beyond_the_machine_is_refused_without_the_variable():
    with pytest.raises(ConfigError, match=r"has 8, but this machine has 8 device\(s\)"):
        visible(None).check(8, count=8)
    visible(None).check(7, count=8)


def test_id_that_cann_does_not_count_is_refused_though_the_variable_names_it():
    with pytest.raises(ConfigError, match="leaves this process 1 device"):
        visible("0,9").check(1, count=1)
    visible("0,9").check(0, count=1)


def test_holders_are_those_of_the_device():
    holders = parse_holders(TABLE, 0, chips_per_npu=1)
    assert [(holder.pid, holder.used_bytes >> 20) for holder in holders] == [
        (4242, 29116),
        (4243, 134),
    ]
    assert parse_holders(TABLE, 1, chips_per_npu=1) == ()


def test_two_chips_share_a_number_on_a_910c():
    assert [holder.pid for holder in parse_holders(TABLE, 7, chips_per_npu=2)] == [55115]


def test_pid_in_a_container_is_that_of_the_container():
    assert [holder.pid for holder in parse_holders(IN_CONTAINER, 2, chips_per_npu=1)] == [77]


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910A", "Ascend910ProB", "Ascend310B1"])
def test_chip_without_the_kernels_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name} is not supported"):
        check_chip(name)


def test_chips_of_a2_and_a3_are_taken_and_unknown_ones_with_a_warning():
    assert check_chip("Ascend910B4") is None
    assert check_chip("Ascend910_9391") is None
    assert "unknown" in (check_chip("Ascend950PR") or "")
