"""What the files and the environment of an Ascend machine say, on folders that stand for one."""

import subprocess
import sys
from pathlib import Path

import pytest
from cann_builders import ARCHITECTURE, AscendMachine, healthy_machine

from engine.backends.cann import (
    CannInstallation,
    Driver,
    missing_environment_sentence,
    read_installation,
)
from engine.backends.cann_versions import (
    Fit,
    driver_and_cann,
    driver_and_firmware,
    torch_npu_and_cann,
    torch_npu_and_torch,
)

ASCEND = Path("/usr/local/Ascend")


def read(machine: AscendMachine) -> CannInstallation:
    return read_installation(machine.root, machine.environment)


def version_of(machine: AscendMachine) -> str | None:
    toolkit = read(machine).toolkit
    assert toolkit is not None
    return toolkit.version


def test_everything_that_is_installed_is_found_and_named_as_its_processes_see_it(
    tmp_path: Path,
) -> None:
    found = read(healthy_machine(tmp_path))
    assert found.driver == Driver(
        version="25.5.1", firmware_ranges=(("6.4.0", "6.4.99"), ("7.0.0", "8.9.9"))
    )
    assert found.firmware_version == "7.8.0.6.201"
    assert found.toolkit is not None
    assert (found.toolkit.home, found.toolkit.version) == (ASCEND / "cann", "9.2.0")
    assert found.toolkit.set_env == ASCEND / "cann/set_env.sh"
    assert found.toolkit.kernels == ("ascend910b",)
    assert found.nnal is not None
    assert (found.nnal.version, found.nnal.is_loaded) == ("9.2.0", True)
    assert found.nnal.set_env == ASCEND / "nnal/atb/set_env.sh"
    assert found.device_files == ("/dev/davinci0", "/dev/davinci1")
    assert found.missing_control_files == ()
    assert [chip.name for chip in found.chips] == ["910B", "910B"]
    assert found.npu_smi == Path("/usr/local/bin/npu-smi")
    assert found.environment_gaps == ()


def test_an_empty_machine_has_nothing_and_needs_nothing(tmp_path: Path) -> None:
    found = read_installation(tmp_path, {})
    assert (found.driver, found.toolkit, found.nnal, found.npu_smi) == (None, None, None, None)
    assert (found.device_files, found.chips, found.environment_gaps) == ((), (), ())
    assert missing_environment_sentence(found) is None


def test_facts_are_to_be_had_where_torch_is_not(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from engine.backends.cann import read_installation; read_installation()\n"
        "from engine import check_ascend; check_ascend()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestToolkit:
    def test_the_older_layout_has_its_set_env_beside_latest(self, tmp_path: Path) -> None:
        found = read(AscendMachine(tmp_path).old_toolkit())
        assert found.toolkit is not None
        assert found.toolkit.home == ASCEND / "ascend-toolkit/latest"
        assert found.toolkit.set_env == ASCEND / "ascend-toolkit/set_env.sh"
        assert found.toolkit.version == "8.5.0"

    def test_the_one_that_is_loaded_comes_before_the_one_that_is_newest(
        self, tmp_path: Path
    ) -> None:
        machine = AscendMachine(tmp_path).toolkit("9.2.0").old_toolkit("8.5.0")
        assert version_of(machine) == "9.2.0"
        machine.source(str(ASCEND / "ascend-toolkit/8.5.0"))
        assert version_of(machine) == "8.5.0"

    def test_a_user_may_have_installed_one_at_home(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).toolkit("9.1.0", base="/home/ada/Ascend")
        assert read(machine).toolkit is None
        machine.environment["HOME"] = "/home/ada"
        assert version_of(machine) == "9.1.0"

    def test_a_variable_that_names_no_folder_does_not_hide_the_one_that_is_there(
        self, tmp_path: Path
    ) -> None:
        machine = AscendMachine(tmp_path).toolkit()
        machine.environment["ASCEND_HOME_PATH"] = "/opt/gone"
        assert version_of(machine) == "9.2.0"
        assert "ASCEND_HOME_PATH is /opt/gone, which is no folder" in read(machine).environment_gaps

    @pytest.mark.parametrize(
        ("file", "text", "version"),
        [
            ("version.cfg", "# version: 1.0\ntoolkit_running_version=[7.6.0.1.220:8.0.0]\n", "8.0.0"),
            ("version.cfg", "toolkit_running_version=[1.83.T8.0.B128:CANN-1.83]\n", "1.83"),
            ("toolkit/version.info", "Version=8.2.0.0.201\nversion_dir=8.2.RC1\n", "8.2.RC1"),
            ("opp/version.info", "Version=9.1.0\n", "9.1.0"),
            ("README", "", None),
        ],
    )  # fmt: skip
    def test_its_version_may_stand_in_other_files_than_the_installers(
        self, tmp_path: Path, file: str, text: str, version: str | None
    ) -> None:
        machine = AscendMachine(tmp_path).toolkit()
        home = tmp_path / "usr/local/Ascend/cann-9.2.0"
        (home / ARCHITECTURE / "ascend_toolkit_install.info").unlink()
        machine.write(f"usr/local/Ascend/cann/{file}", text)
        assert version_of(machine) == version

    def test_of_a_toolkit_for_two_architectures_this_machines_own_is_read(
        self, tmp_path: Path
    ) -> None:
        machine = AscendMachine(tmp_path).toolkit("9.2.0")
        for other in ("aaa-linux", "zzz-linux"):
            machine.write(
                f"usr/local/Ascend/cann/{other}/ascend_toolkit_install.info", "version=8.5.0\n"
            )
        assert version_of(machine) == "9.2.0"

    def test_a_toolkit_without_the_package_of_operators_has_none(self, tmp_path: Path) -> None:
        found = read(AscendMachine(tmp_path).toolkit(kernels=()))
        assert found.toolkit is not None
        assert found.toolkit.kernels == ()


class TestEnvironment:
    @pytest.mark.parametrize(
        ("variable", "gap"),
        [
            ("ASCEND_HOME_PATH", "ASCEND_HOME_PATH is not set"),
            ("ASCEND_OPP_PATH", "ASCEND_OPP_PATH is not set"),
            ("LD_LIBRARY_PATH", "LD_LIBRARY_PATH does not name /usr/local/Ascend/cann/lib64"),
        ],
    )
    def test_each_variable_that_is_missing_is_named(
        self, tmp_path: Path, variable: str, gap: str
    ) -> None:
        machine = healthy_machine(tmp_path)
        del machine.environment[variable]
        assert read(machine).environment_gaps == (gap,)

    def test_a_folder_under_another_of_its_names_is_the_same(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).toolkit().source()
        machine.environment["LD_LIBRARY_PATH"] = "/usr/local/Ascend/cann-9.2.0/lib64"
        assert read(machine).environment_gaps == ()

    def test_the_libraries_of_another_toolkit_do_not_count(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).toolkit().old_toolkit().source()
        machine.environment["LD_LIBRARY_PATH"] = "/usr/local/Ascend/ascend-toolkit/latest/lib64"
        assert read(machine).environment_gaps == (
            "LD_LIBRARY_PATH does not name /usr/local/Ascend/cann/lib64",
        )

    def test_another_folder_of_the_toolkit_is_not_its_libraries(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).toolkit().source()
        machine.environment["LD_LIBRARY_PATH"] = "/usr/local/Ascend/cann/devlib"
        assert len(read(machine).environment_gaps) == 1

    def test_an_atb_that_is_gone_is_not_loaded(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).toolkit().nnal()
        machine.environment["ATB_HOME_PATH"] = "/usr/local/Ascend/nnal/atb/8.5.0/atb/cxx_abi_1"
        nnal = read(machine).nnal
        assert nnal is not None
        assert not nnal.is_loaded

    def test_the_sentence_says_what_to_source_and_where_it_is_forgotten(
        self, tmp_path: Path
    ) -> None:
        machine = AscendMachine(tmp_path).old_toolkit().nnal()
        sentence = missing_environment_sentence(read(machine))
        assert sentence is not None
        assert "ASCEND_HOME_PATH is not set" in sentence
        assert (
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh && "
            "source /usr/local/Ascend/nnal/atb/set_env.sh`"
        ) in sentence
        assert "cron, systemd and a Prefect worker" in sentence

    def test_what_is_loaded_needs_no_sentence(self, tmp_path: Path) -> None:
        assert missing_environment_sentence(read(healthy_machine(tmp_path))) is None


class TestCards:
    def test_310p_is_recognised_and_unsupported(self, tmp_path: Path) -> None:
        (chip,) = read(AscendMachine(tmp_path).cards(1, "0xd500")).chips
        assert (chip.name, chip.is_supported) == ("310P", False)

    def test_other_devices_of_the_bus_are_nobodys_npu(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path)
        machine.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        machine.write("sys/bus/pci/devices/0000:01:00.0/device", "0xd802\n")
        machine.write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x19e5\n")
        machine.write("sys/bus/pci/devices/0000:02:00.0/device", "0x0200\n")
        assert read(machine).chips == ()

    def test_ten_cards_are_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        files = read(AscendMachine(tmp_path).cards(9).cards(11)).device_files
        assert files == tuple(f"/dev/davinci{number}" for number in range(11))

    def test_the_files_that_every_card_needs_are_missed(self, tmp_path: Path) -> None:
        machine = AscendMachine(tmp_path).cards()
        (tmp_path / "dev/hisi_hdc").unlink()
        assert read(machine).missing_control_files == ("/dev/hisi_hdc",)


class TestVersions:
    @pytest.mark.parametrize(
        ("driver", "cann", "fit"),
        [
            ("25.3.rc1", "9.2.0", Fit.GOOD),
            ("25.2.0", "9.2.0", Fit.BAD),
            ("25.2.0", "9.1.0-beta.1", Fit.GOOD),
            ("25.0.rc1.1", "9.1.0", Fit.BAD),
            ("25.0.rc1.1", "8.5.0", Fit.GOOD),
            ("24.1.0", "8.5.0", Fit.BAD),
            ("26.9.0", "9.2.0", Fit.UNKNOWN),
            ("25.1.rc2", "9.2.0", Fit.UNKNOWN),  # a line of its own, of other boards
            ("24.1.0", "8.1.RC1", Fit.UNKNOWN),
            ("odd", "9.2.0", Fit.UNKNOWN),
        ],
    )
    def test_a_driver_is_too_old_only_where_a_list_says_so(
        self, driver: str, cann: str, fit: Fit
    ) -> None:
        assert driver_and_cann(driver, cann).fit is fit

    def test_a_driver_that_is_too_old_is_told_what_is_wanted(self) -> None:
        assert driver_and_cann("25.2.0", "9.2.0").note == (
            "driver 25.2.0 is too old: CANN 9.2.0 wants driver 25.3 or newer"
        )

    @pytest.mark.parametrize(
        ("firmware", "fit"),
        [
            ("7.0.0", Fit.GOOD),
            ("8.9.9.1.2", Fit.GOOD),
            ("6.4.50", Fit.GOOD),
            ("6.5.0", Fit.BAD),
            ("9.0.0", Fit.BAD),
            ("?", Fit.UNKNOWN),
        ],
    )
    def test_a_firmware_fits_in_one_of_the_drivers_ranges(self, firmware: str, fit: Fit) -> None:
        driver = Driver(version="25.5.1", firmware_ranges=(("6.4.0", "6.4.99"), ("7.0.0", "8.9.9")))
        assert driver_and_firmware(driver, firmware).fit is fit

    def test_a_driver_without_ranges_speaks_against_no_firmware(self) -> None:
        assert driver_and_firmware(Driver(version="1.0"), "7.1.0").fit is Fit.UNKNOWN

    @pytest.mark.parametrize(
        ("torch_npu", "torch", "fit"),
        [
            ("2.13.0", "2.13.0+cpu", Fit.GOOD),
            ("2.13.0.post2", "2.13.1", Fit.GOOD),
            ("2.12.0", "2.13.0", Fit.BAD),
            ("2.1.0", "2.13.0", Fit.BAD),
        ],
    )
    def test_torch_npu_is_for_one_minor_version_of_torch(
        self, torch_npu: str, torch: str, fit: Fit
    ) -> None:
        assert torch_npu_and_torch(torch_npu, torch).fit is fit

    @pytest.mark.parametrize(
        ("torch_npu", "cann", "fit"),
        [
            ("2.13.0", "9.2.0", Fit.GOOD),
            ("2.13.0", "8.5.0", Fit.GOOD),
            ("2.13.0", "8.3.RC1", Fit.UNKNOWN),
            ("2.13.0", "10.0.0", Fit.UNKNOWN),
            ("2.15.0", "9.2.0", Fit.UNKNOWN),
        ],
    )
    def test_a_cann_that_no_list_names_is_unknown_and_never_wrong(
        self, torch_npu: str, cann: str, fit: Fit
    ) -> None:
        assert torch_npu_and_cann(torch_npu, cann).fit is fit
