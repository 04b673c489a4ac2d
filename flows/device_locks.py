"""Which process of this host owns a device: a file lock for each, which dies with its process.

The locks are flocks in a folder that all users of the host share. Who finds a device taken lines
up with a ticket, a file that is locked as long as its owner lives: devices go to the oldest
ticket that names them, and whoever keeps an idle device warm sees that it is wanted.
"""

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine import ConfigError

# The same for every user of the host; TMPDIR may differ from one to the next.
DEFAULT_LOCK_DIR = Path("/tmp/tokenmill-devices")
_TICKET_SUFFIX = ".waiting"
_LOCK_SUFFIX = ".lock"
_MAX_CLAIM_BYTES = 65_536
_ticket_numbers = itertools.count()


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns devices or waits for them.

    since is in seconds since the epoch; pid is None for one that has not said yet who it is.
    """

    pid: int | None
    job_id: str
    since: float
    devices: tuple[str, ...]

    def __str__(self) -> str:
        if self.pid is None:
            return "an unknown process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} of job {self.job_id} since {since}"


class Hold:
    """Devices that this process owns until it releases them or dies."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._endings: list[Callable[[], None]] = []

    def keep(self, descriptor: int) -> None:
        """Add a locked file."""
        self._descriptors.append(descriptor)

    def at_end(self, ending: Callable[[], None]) -> None:
        """Add what is to be called when the devices are released."""
        self._endings.append(ending)

    def release(self) -> None:
        """Let others have the devices; the second time does nothing."""
        while self._endings:
            self._endings.pop()()
        while self._descriptors:
            os.close(self._descriptors.pop())


class Ticket:
    """A place in the line; names sort by arrival."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.name = path.name
        self._path = path
        self._descriptor = descriptor

    def leave(self) -> None:
        """Give the place up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class DeviceLocks:
    """The devices of this host, as one job sees them. Nothing is written before it is needed."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.folder = folder
        self._job_id = job_id

    def try_take(self, devices: tuple[str, ...], ticket: Ticket | None = None) -> Hold | None:
        """Take all of the devices or none; None when one is taken, or others are before us.

        Nobody waits with one device in hand for another, so that no two can wait for each other.

        Raises:
            ConfigError: the folder of the locks cannot be used.
        """
        hold = Hold()
        if not devices:
            return hold
        with _explained(self.folder):
            self.make_folder()
            if self._first_before(devices, ticket) is not None:
                return None
            try:
                is_taken = self._lock_all(devices, hold)
            except BaseException:
                hold.release()
                raise
        return hold if is_taken else None

    def line_up(self, devices: tuple[str, ...]) -> Ticket:
        """Take a place in the line of some devices, behind all who wait for one of them.

        Raises:
            ConfigError: the folder of the locks cannot be used.
        """
        # Locked before it has the name by which others find it: one without a lock is a dead one's.
        name = f"{time.time_ns():020d}-{os.getpid()}-{next(_ticket_numbers)}"
        path = self.folder / f"{name}{_TICKET_SUFFIX}"
        with _explained(self.folder):
            self.make_folder()
            hidden = self.folder / f".{name}"
            descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(descriptor, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, msgspec.json.encode(self._claim(devices)))
            hidden.rename(path)
        return Ticket(path, descriptor)

    def is_wanted(self, devices: tuple[str, ...], own: Ticket | None = None) -> bool:
        """Tell whether anybody else waits for one of the devices."""
        if not devices:
            return False
        own_name = None if own is None else own.name
        with suppress(OSError):  # an idle engine that is not closed for it closes by itself later
            return any(
                name != own_name and set(claim.devices) & set(devices)
                for name, claim in self._line()
            )
        return False

    def describe(self, devices: tuple[str, ...], ticket: Ticket | None = None) -> str:
        """Say who has the devices, for a log: `device npu:0, held by process 7 of job-1 since ...`."""
        parts = []
        for device in devices:
            holder = _claim_on(self._path_of(device))
            if holder is not None:
                parts.append(f"device {device}, held by {holder}")
        before = self._first_before(devices, ticket)
        if not parts and before is not None:
            parts.append(f"device {', '.join(devices)}, for which {before} waits too")
        return "; ".join(parts) or f"device {', '.join(devices)}"

    def owners(self) -> list[Claim]:
        """Return who has devices; several devices of one engine are one claim."""
        return list(dict.fromkeys(self._claims()))

    def num_locked(self) -> int:
        """Count the devices that somebody has."""
        return len(self._claims())

    def waiting(self) -> list[Claim]:
        """Return who waits for devices, who came first before the others."""
        return [claim for _, claim in self._line()] if self.folder.is_dir() else []

    def _lock_all(self, devices: tuple[str, ...], hold: Hold) -> bool:
        hold.keep(_keep_from_cleaning(self.folder))
        claim = self._claim(devices)
        for device in devices:
            descriptor = _try_lock(self._path_of(device), claim)
            if descriptor is None:
                hold.release()
                return False
            hold.keep(descriptor)
        return True

    def _first_before(self, devices: tuple[str, ...], ticket: Ticket | None) -> Claim | None:
        """Return who is served first of those that wait for one of the devices, unless it is us."""
        for name, claim in self._line():
            if ticket is not None and name >= ticket.name:
                return None
            if set(claim.devices) & set(devices):
                return claim
        return None

    def _line(self) -> list[tuple[str, Claim]]:
        """Return the living tickets by arrival, and remove the dead."""
        names = sorted(n for n in os.listdir(self.folder) if n.endswith(_TICKET_SUFFIX))
        line = []
        for name in names:
            claim = _claim_on(self.folder / name)
            if claim is not None:
                line.append((name, claim))
            else:
                with suppress(OSError):  # only its owner may remove it
                    (self.folder / name).unlink()
        return line

    def _claims(self) -> list[Claim]:
        """Return the claim on each device that somebody has."""
        found = (_claim_on(path) for path in sorted(self.folder.glob(f"*{_LOCK_SUFFIX}")))
        return [claim for claim in found if claim is not None]

    def _claim(self, devices: tuple[str, ...]) -> Claim:
        return Claim(pid=os.getpid(), job_id=self._job_id, since=time.time(), devices=devices)

    def _path_of(self, device: str) -> Path:
        return self.folder / f"{device.replace(':', '-').replace('/', '-')}{_LOCK_SUFFIX}"

    def make_folder(self) -> None:
        """Make the folder of the locks, for all users, unless it is there.

        Raises:
            ConfigError: it cannot be made.
        """
        if self.folder.is_dir():
            return
        with _explained(self.folder), suppress(FileExistsError):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
            # Every user of the host may add files, and remove only their own.
            self.folder.chmod(0o1777)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the file system says into what the user can do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the locks of the devices in {folder} cannot be used: {error}; make the folder "
            "writable for every user of the devices (chmod 1777), or set device_lock_dir to one "
            "that is"
        ) from error


def _keep_from_cleaning(folder: Path) -> int:
    """Lock the folder, shared; systemd-tmpfiles leaves old files of such a folder alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _try_flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _try_lock(path: Path, claim: Claim) -> int | None:
    """Lock a device's file and write who owns it; return its descriptor, None when it is taken."""
    descriptor = _open_shared(path)
    if not _try_flock(descriptor, fcntl.LOCK_EX) or not _is_same_file(descriptor, path):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(claim), 0)
    return descriptor


def _open_shared(path: Path) -> int:
    """Open a file that every user may lock; it is never removed, only made when it is missing."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    # Linux lets nobody open another's file in such a folder with O_CREAT.
    with suppress(FileNotFoundError):
        return os.open(path, flags)
    with suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor
    return os.open(path, flags)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Tell whether the file is still the one of that name: a cleaner may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _claim_on(path: Path) -> Claim | None:
    """Return what a process that lives has written to a file that it has locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        is_free = _try_flock(descriptor, fcntl.LOCK_SH)
        return None if is_free else _read_claim(descriptor)
    finally:
        os.close(descriptor)


def _read_claim(descriptor: int) -> Claim:
    try:
        return msgspec.json.decode(os.pread(descriptor, _MAX_CLAIM_BYTES, 0), type=Claim)
    except msgspec.DecodeError:  # it is being written
        return Claim(pid=None, job_id="?", since=time.time(), devices=())
