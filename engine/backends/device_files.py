"""What `auto` will be, told by the device files of drivers, without torch and without a driver call."""

from pathlib import Path

_FILES = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}


def expected_device(device: str, root: Path = Path("/")) -> str:
    """Return the kind of device that an engine will take where its configuration says `device`.

    With auto that is the first kind of accelerator that has files in /dev. A worker may still
    take the CPU, where there is no software for the accelerator; the other way round is impossible.
    """
    if device != "auto":
        return device
    return next((kind for kind, files in _FILES.items() if any((root / "dev").glob(files))), "cpu")
