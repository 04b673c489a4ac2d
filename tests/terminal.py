"""The command line in this process, called as a shell calls it."""

import sys
from dataclasses import dataclass

import pytest

from flows.cli import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Terminal:
    """Calls the command line as a shell does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["tokenmill", *arguments])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = self._capfd.readouterr()
        return Ended(caught.value.code or 0, out, err)  # type: ignore[arg-type]
