"""What the doctor says about machines with Ascend cards: right ones, and each way to be wrong."""

import socket
from pathlib import Path

import psutil
import pytest
from cann_builders import AscendMachine, healthy_machine

from engine import Finding, FindingStatus, check_ascend


def examine(machine: AscendMachine) -> dict[str, Finding]:
    findings = check_ascend(machine.root, machine.environment, machine.packages)
    by_check = {finding.check: finding for finding in findings}
    assert len(by_check) == len(findings)
    return by_check


def not_ok(machine: AscendMachine) -> dict[str, Finding]:
    return {
        name: finding
        for name, finding in examine(machine).items()
        if finding.status is not FindingStatus.OK
    }


def only_problem(machine: AscendMachine) -> Finding:
    (finding,) = not_ok(machine).values()
    return finding


def test_a_machine_where_everything_fits_is_ok_line_for_line(tmp_path: Path) -> None:
    lines = {name: finding.found for name, finding in examine(healthy_machine(tmp_path)).items()}
    assert lines == {
        "npu cards": "2 card(s) (910B)",
        "npu driver": "firmware 7.8.0.6.201 fits driver 25.5.1",
        "cann toolkit": "9.2.0 in /usr/local/Ascend/cann",
        "cann operators": "for ascend910b",
        "cann and driver": "driver 25.5.1 is listed for CANN 9.2.0",
        "cann environment": "loaded",
        "cann nnal": "ATB 9.2.0",
        "torch_npu": "CANN 9.2.0 is listed for torch_npu 2.13.0",
        "hccl environment": "nothing is set, HCCL takes its own defaults",
    }
    assert not_ok(healthy_machine(tmp_path / "again")) == {}


class TestWithoutCards:
    def test_a_machine_without_anything_of_ascend_is_one_ok_line(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path)
        del machine.packages["torch_npu"]
        (finding,) = examine(machine).values()
        assert (finding.check, finding.status) == ("npu", FindingStatus.OK)

    def test_software_without_a_card_is_one_warning(self, tmp_path: Path) -> None:
        (finding,) = examine(AscendMachine(tmp_path).toolkit()).values()
        assert (finding.check, finding.status) == ("npu", FindingStatus.WARNING)
        assert finding.found == (
            "no card and no driver, but CANN in /usr/local/Ascend/cann and torch_npu 2.13.0"
        )

    def test_a_container_without_the_device_files_is_told_how_to_be_started(
        self, tmp_path: Path
    ) -> None:
        machine = healthy_machine(tmp_path)
        for number in range(2):
            (tmp_path / f"dev/davinci{number}").unlink()
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("npu cards", FindingStatus.ERROR)
        assert "--device /dev/davinci0" in str(finding.remedy)

    def test_a_container_without_the_manager_cannot_use_its_cards(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        (tmp_path / "dev/davinci_manager").unlink()
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("npu cards", FindingStatus.ERROR)
        assert "no /dev/davinci_manager" in finding.found


class TestChips:
    def test_310p_is_an_error_that_names_what_is_supported(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).cards(1, "0xd500")
        finding = examine(machine)["npu cards"]
        assert finding.status is FindingStatus.ERROR
        assert finding.found == "this machine has Ascend 310P, which tokenmill does not support"
        assert "910B, 910C" in str(finding.remedy)

    def test_a_310p_beside_a_910b_speaks_against_nothing(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        machine.write("sys/bus/pci/devices/0000:09:00.0/vendor", "0x19e5\n")
        machine.write("sys/bus/pci/devices/0000:09:00.0/device", "0xd500\n")
        assert examine(machine)["npu cards"].found == "2 card(s) (310P, 910B)"

    def test_operators_of_another_chip_are_a_warning(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).cards(chip="0xd803").driver().toolkit().nnal()
        finding = only_problem(machine.source().source_nnal())
        assert (finding.check, finding.status) == ("cann operators", FindingStatus.WARNING)
        assert "none for 910C" in finding.found
        assert "Ascend-cann-910c-ops" in str(finding.remedy)


class TestDriver:
    def test_a_driver_that_is_too_old_for_the_toolkit_is_an_error(self, tmp_path: Path) -> None:
        finding = only_problem(healthy_machine(tmp_path).driver("25.2.0"))
        assert (finding.check, finding.status) == ("cann and driver", FindingStatus.ERROR)
        assert "wants driver 25.3 or newer" in finding.found

    def test_a_driver_that_no_list_knows_is_a_warning(self, tmp_path: Path) -> None:
        finding = only_problem(healthy_machine(tmp_path).driver("27.0.0"))
        assert (finding.check, finding.status) == ("cann and driver", FindingStatus.WARNING)

    def test_cards_without_a_driver_are_an_error_and_no_comparison(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        (tmp_path / "usr/local/Ascend/driver/version.info").unlink()
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("npu driver", FindingStatus.ERROR)
        assert "mount /usr/local/Ascend/driver" in str(finding.remedy)
        assert "cann and driver" not in examine(machine)

    def test_a_firmware_of_another_release_is_an_error(self, tmp_path: Path) -> None:
        finding = only_problem(healthy_machine(tmp_path).driver(firmware="6.3.0.1.241"))
        assert (finding.check, finding.status) == ("npu driver", FindingStatus.ERROR)
        assert "wants 6.4.0 to 6.4.99, 7.0.0 to 8.9.9" in finding.found

    def test_a_firmware_that_a_container_does_not_see_is_no_problem(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        (tmp_path / "usr/local/Ascend/firmware/version.info").unlink()
        assert not_ok(machine) == {}


class TestToolkit:
    def test_cards_without_a_toolkit_are_an_error(self, tmp_path: Path) -> None:
        problems = not_ok(AscendMachine(tmp_path).cards().driver())
        assert list(problems) == ["cann toolkit"]
        assert problems["cann toolkit"].status is FindingStatus.ERROR

    def test_a_toolkit_whose_environment_is_not_loaded_is_an_error(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).cards().driver().toolkit().nnal().source_nnal()
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("cann environment", FindingStatus.ERROR)
        assert finding.found.startswith("the environment of CANN is not loaded in this process")
        assert str(finding.remedy).startswith("run `source /usr/local/Ascend/cann/set_env.sh`")

    @pytest.mark.parametrize("is_installed", [True, False])
    def test_a_missing_atb_is_a_warning(self, tmp_path: Path, is_installed: bool) -> None:
        machine = AscendMachine(tmp_path).cards().driver().toolkit().source()
        if is_installed:
            machine.nnal()
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("cann nnal", FindingStatus.WARNING)
        assert ("is not loaded" in finding.found) == is_installed


class TestTorchNpu:
    def test_torch_npu_of_another_minor_version_is_an_error(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        machine.packages["torch_npu"] = "2.12.0.post3"
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("torch_npu", FindingStatus.ERROR)
        assert finding.found == "torch_npu 2.12.0.post3 is made for another torch than 2.13.0"

    def test_cards_without_torch_npu_are_an_error(self, tmp_path: Path) -> None:
        machine = healthy_machine(tmp_path)
        del machine.packages["torch_npu"]
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("torch_npu", FindingStatus.ERROR)
        assert finding.remedy == "pip install 'tokenmill[npu]'"

    def test_a_cann_that_is_not_listed_for_it_is_a_warning(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).cards().driver("24.1.0").toolkit("8.2.RC1").nnal()
        problems = not_ok(machine.source().source_nnal())
        assert problems["torch_npu"].status is FindingStatus.WARNING
        assert problems["torch_npu"].found == (
            "torch_npu 2.13.0 is listed with CANN 8.5 to 9.2, not with 8.2.RC1"
        )


class TestHccl:
    @pytest.mark.parametrize(
        ("name", "value", "wanted", "status"),
        [
            ("HCCL_IF_IP", "203.0.113.9", "an address of this host", FindingStatus.ERROR),
            ("HCCL_IF_IP", "eth0", "an address of this host", FindingStatus.ERROR),
            ("HCCL_BUFFSIZE", "200M", "a number of MB", FindingStatus.ERROR),
            ("HCCL_BUFFSIZE", "0", "a number of MB", FindingStatus.ERROR),
            ("HCCL_OP_EXPANSION_MODE", "aiv", "AI_CPU or AIV or HOST", FindingStatus.WARNING),
            ("HCCL_DETERMINISTIC", "yes", "true or false or strict", FindingStatus.WARNING),
        ],
    )
    def test_a_value_that_hccl_does_not_know_is_named_with_those_it_knows(
        self, tmp_path: Path, name: str, value: str, wanted: str, status: FindingStatus
    ) -> None:
        machine = healthy_machine(tmp_path)
        machine.environment[name] = value
        finding = only_problem(machine)
        assert (finding.check, finding.status) == ("hccl environment", status)
        assert f"{name} is {value!r}, wanted {wanted}" in finding.found

    def test_values_that_it_knows_are_shown(self, tmp_path: Path) -> None:
        own = next(
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family is socket.AF_INET
        )
        machine = healthy_machine(tmp_path)
        machine.environment |= {
            "HCCL_IF_IP": own,
            "HCCL_BUFFSIZE": "200",
            "HCCL_OP_EXPANSION_MODE": "AIV",
            "HCCL_DETERMINISTIC": "strict",
        }
        assert not_ok(machine) == {}
        assert examine(machine)["hccl environment"].found == (
            f"HCCL_IF_IP={own}, HCCL_BUFFSIZE=200, HCCL_OP_EXPANSION_MODE=AIV, "
            "HCCL_DETERMINISTIC=strict"
        )

    def test_where_no_card_is_seen_nothing_is_said_about_it(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).driver().toolkit().nnal().source().source_nnal()
        machine.environment["HCCL_BUFFSIZE"] = "much"
        assert "hccl environment" not in examine(machine)
