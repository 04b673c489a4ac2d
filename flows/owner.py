"""Who holds a lease: a process, told apart from every other one, also after its pid is reused."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process on a host.

    start_time is in clock ticks since boot (epoch milliseconds where there is no /proc): it does
    not move when somebody sets the clock. pid_namespace tells containers apart that share the
    name of their host: a pid means nothing outside its namespace.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int

    @classmethod
    def current(cls) -> "Owner":
        """Return this process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=pid,
            start_time=_start_time(pid) or 0,
        )

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """Read what `str` wrote."""
        host, boot_id, pid_namespace, pid, start_time = text.rsplit("|", 4)
        return cls(
            host=host,
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=int(pid),
            start_time=int(start_time),
        )

    def __str__(self) -> str:
        return f"{self.host}|{self.boot_id}|{self.pid_namespace}|{self.pid}|{self.start_time}"

    def is_gone(self) -> bool:
        """Tell whether the process has surely ended; False where this process cannot know."""
        if self.host != socket.gethostname():
            return False
        if self.boot_id != _boot_id():
            return True
        if self.pid_namespace != _pid_namespace():
            return False
        try:
            return _start_time(self.pid) != self.start_time
        except PermissionError:
            return False


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _pid_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Return when the process started; None when there is none, or only its zombie.

    Raises:
        PermissionError: it lives, but /proc hides the processes of other users (hidepid).
    """
    if not (_PROC / "self/stat").exists():
        return _start_time_without_proc(pid)
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError as error:
        if psutil.pid_exists(pid):
            raise PermissionError(f"process {pid} is hidden") from error
        return None
    # The name in brackets may hold spaces and brackets; the fields after it are state, ppid, ...
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_time_without_proc(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
