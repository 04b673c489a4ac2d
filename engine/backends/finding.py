"""What a check of this machine has found."""

from dataclasses import dataclass
from enum import StrEnum


class FindingStatus(StrEnum):
    """Whether a run can begin as things are."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report: which check, how it ended, what was found, what to do about it."""

    check: str
    status: FindingStatus
    found: str
    remedy: str | None = None

    @classmethod
    def ok(cls, check: str, found: str) -> "Finding":
        """Nothing has to be done."""
        return cls(check=check, status=FindingStatus.OK, found=found)

    @classmethod
    def warning(cls, check: str, found: str, remedy: str | None = None) -> "Finding":
        """A run can begin, and the user should know."""
        return cls(check=check, status=FindingStatus.WARNING, found=found, remedy=remedy)

    @classmethod
    def error(cls, check: str, found: str, remedy: str | None = None) -> "Finding":
        """The user must act before a run can use this."""
        return cls(check=check, status=FindingStatus.ERROR, found=found, remedy=remedy)
