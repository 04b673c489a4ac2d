"""Which columns a table has and what they hold: decided by reading the whole input once.

A column has the narrowest kind that holds all of its values; where they are of several kinds it
holds each value as JSON text. Rows that cannot be asked do not decide, so that one bad line does
not change the type of a column; what they have that does not fit is null, and whole in the file of
failed rows.
"""

from collections.abc import Iterable
from typing import Any

from engine import ConfigError, SamplingParams
from flows.ledger_rows import CompletionRow
from flows.outputs.answers import AnsweredRow
from flows.outputs.column_kinds import Kind, ListOf, Simple, StructOf, widened
from flows.outputs.results import TokenTexts, results_of
from flows.records import ROW_ID_FIELD
from flows.rows import BadRow, PromptRecord, printable

_MAX_COLUMNS = 10_000

_TOKEN: tuple[tuple[str, Kind], ...] = (
    ("token", Simple.TEXT),
    ("token_id", Simple.INT),
    ("logprob", Simple.FLOAT),
)
_LOGPROBS = ListOf(
    StructOf((*_TOKEN, ("rank", Simple.INT), ("top", ListOf(StructOf(_TOKEN))))),
)
_RESULT_KINDS: dict[str, Kind] = {
    "sample_index": Simple.INT,
    "text": Simple.TEXT,
    "replies": ListOf(Simple.TEXT),
    "finish_reason": Simple.TEXT,
    "num_prompt_tokens": Simple.INT,
    "num_output_tokens": Simple.INT,
    "is_truncated": Simple.BOOL,
    "logprobs": _LOGPROBS,
    "reply_logprobs": ListOf(_LOGPROBS),
    "prompt_logprobs": _LOGPROBS,
    "error_code": Simple.TEXT,
    "error_message": Simple.TEXT,
}
_OPTIONAL = ("sample_index", "replies", "logprobs", "reply_logprobs", "prompt_logprobs")


class TableColumns:
    """The columns of a table in order: the row's id, its own columns, the results.

    Results that no row has asked for (logprobs, several samples, replies) have no column.

    Raises:
        ConfigError: more columns than a table can have, or two that it would call alike.
    """

    def __init__(
        self,
        rows: Iterable[PromptRecord | BadRow],
        sampling: SamplingParams,
        result_prefix: str,
    ) -> None:
        scan = _Scan(sampling)
        for row in rows:
            scan.add(row)
        carried = scan.kinds()
        results = {
            name: kind
            for name, kind in _RESULT_KINDS.items()
            if name not in _OPTIONAL or name in scan.asked
        }
        self._carried = list(carried)
        self._results = list(results)
        self.names = [
            ROW_ID_FIELD,
            *map(printable, carried),
            *(result_prefix + name for name in results),
        ]
        self.kinds: list[Kind] = [Simple.TEXT, *carried.values(), *results.values()]
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ConfigError(
                f"a table would have two columns {twice!r}; rename one of them in the input, or "
                "set output.format: jsonl"
            )

    def values(self, row: AnsweredRow, sample: CompletionRow, texts: TokenTexts) -> list[Any]:
        """Return what a sample's line holds, in the order of names."""
        results = results_of(row, sample, texts)
        error = results["error"] or {}
        results["error_code"] = error.get("code")
        results["error_message"] = error.get("message")
        results.setdefault("is_truncated", False)
        columns = row.record.columns
        return [
            row.record.row_id,
            *(columns.get(name) for name in self._carried),
            *(results.get(name) for name in self._results),
        ]


class _Scan:
    """Looks at every row of the input, one after the other."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._defaults = {
            "n": sampling.n,
            "logprobs": sampling.logprobs,
            "prompt_logprobs": sampling.prompt_logprobs,
        }
        self._kinds: dict[str, Kind] = {}
        self._kinds_of_bad_rows: dict[str, Kind] = {}
        self.asked: set[str] = set()

    def add(self, row: PromptRecord | BadRow) -> None:
        kinds = self._kinds_of_bad_rows if isinstance(row, BadRow) else self._kinds
        for name, value in row.columns.items():
            self._kinds.setdefault(name, Simple.NULL)  # keeps the order in which names come
            kinds[name] = widened(kinds.get(name, Simple.NULL), value)
        if len(self._kinds) > _MAX_COLUMNS:
            raise ConfigError(
                f"the input has more than {_MAX_COLUMNS} different columns, too many for a table; "
                "set output.format: jsonl"
            )
        if isinstance(row, PromptRecord):
            self._note_what_is_asked(row)

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds by name, in the order in which the names came."""
        kinds = {
            name: self._kinds_of_bad_rows.get(name, kind) if kind is Simple.NULL else kind
            for name, kind in self._kinds.items()
        }
        kinds.pop(ROW_ID_FIELD, None)
        return kinds

    def _note_what_is_asked(self, row: PromptRecord) -> None:
        asked = self._defaults | row.sampling
        if isinstance(asked["n"], int) and asked["n"] > 1:
            self.asked.add("sample_index")
        if row.turns:
            self.asked.add("replies")
        if asked["logprobs"] is not None:
            self.asked.update(("logprobs", "reply_logprobs") if row.turns else ("logprobs",))
        if asked["prompt_logprobs"] is not None:
            self.asked.add("prompt_logprobs")
