"""Folders that stand for machines with Ascend software, laid out as CANN's installers do."""

import platform
from pathlib import Path

_ASCEND = "usr/local/Ascend"
ARCHITECTURE = f"{platform.machine()}-linux"


class AscendMachine:
    """A root folder and the environment of a process; each method installs something."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {"PATH": "/usr/bin"}
        self.packages: dict[str, str] = {"torch": "2.13.0", "torch_npu": "2.13.0"}

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def cards(self, count: int = 2, chip: str = "0xd802") -> "AscendMachine":
        for number in range(count):
            self.write(f"dev/davinci{number}")
            device = f"sys/bus/pci/devices/0000:0{number}:00.0"
            self.write(f"{device}/vendor", "0x19e5\n")
            self.write(f"{device}/device", f"{chip}\n")
        for name in ("davinci_manager", "devmm_svm", "hisi_hdc"):
            self.write(f"dev/{name}")
        self.write("usr/local/bin/npu-smi")
        return self

    def driver(
        self, version: str = "25.5.1", firmware: str | None = "7.8.0.6.201"
    ) -> "AscendMachine":
        self.write(
            f"{_ASCEND}/driver/version.info",
            f"Version={version}\nascendhal_version=7.35.23\nInnerversion=V100R001C23SPC006B220\n"
            "compatible_version=[V100R001C19],[V100R001C23]\n"
            f"compatible_version_fw=[6.4.0,6.4.99],[7.0.0,8.9.9]\npackage_version={version}\n",
        )
        if firmware is not None:
            self.write(
                f"{_ASCEND}/firmware/version.info", f"Version={firmware}\nfirmware_version=1.0\n"
            )
        return self

    def toolkit(
        self,
        version: str = "9.2.0",
        *,
        base: str = f"/{_ASCEND}",
        kernels: tuple[str, ...] = ("ascend910b",),
    ) -> "AscendMachine":
        """Install a CANN of the newer layout: cann-VERSION, and a link cann to it."""
        home = f"{base}/cann-{version}"
        self._fill_toolkit(home, version, kernels)
        self.write(f"{home}/set_env.sh")
        self._link(f"{base}/cann", f"cann-{version}")
        return self

    def old_toolkit(self, version: str = "8.5.0") -> "AscendMachine":
        """Install a CANN of the older layout: ascend-toolkit/VERSION, and a link latest to it."""
        base = f"/{_ASCEND}/ascend-toolkit"
        self._fill_toolkit(f"{base}/{version}", version, ("ascend910b",))
        self.write(f"{base}/set_env.sh")
        self._link(f"{base}/latest", version)
        return self

    def nnal(self, version: str = "9.2.0") -> "AscendMachine":
        folder = f"{_ASCEND}/nnal/atb"
        self.write(f"{folder}/set_env.sh")
        self.write(
            f"{folder}/latest/version.info",
            f"    Ascend-cann-atb : {version}\n    Platform : aarch64\n",
        )
        (self.root / folder / "latest/atb/cxx_abi_1").mkdir(parents=True)
        return self

    def source(self, home: str = f"/{_ASCEND}/cann") -> "AscendMachine":
        """Set what the set_env.sh of a toolkit sets."""
        self.environment |= {
            "ASCEND_HOME_PATH": home,
            "ASCEND_TOOLKIT_HOME": home,
            "ASCEND_OPP_PATH": f"{home}/opp",
            "LD_LIBRARY_PATH": f"/opt/other/lib:{home}/lib64:{home}/lib64/plugin",
        }
        return self

    def source_nnal(self) -> "AscendMachine":
        self.environment["ATB_HOME_PATH"] = f"/{_ASCEND}/nnal/atb/latest/atb/cxx_abi_1"
        return self

    def _fill_toolkit(self, home: str, version: str, kernels: tuple[str, ...]) -> None:
        self.write(
            f"{home}/{ARCHITECTURE}/ascend_toolkit_install.info",
            f"package_name=Ascend-cann-toolkit\nversion={version}\n"
            f"innerversion=V100R001C25SPC001B212\narch={platform.machine()}\n",
        )
        (self.root / home.lstrip("/") / "lib64").mkdir()
        operators = f"{home}/opp/built-in/op_impl/ai_core/tbe/kernel"
        self.write(f"{operators}/ascend910b/ops_oam/one.o")
        for chip in kernels:
            self.write(f"{operators}/{chip}/ops_transformer/one.o")

    def _link(self, path: str, target: str) -> None:
        (self.root / path.lstrip("/")).symlink_to(target)


def healthy_machine(root: Path) -> AscendMachine:
    """Return a machine with two 910B where everything fits and is loaded."""
    return AscendMachine(root).cards().driver().toolkit().nnal().source().source_nnal()
