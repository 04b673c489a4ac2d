"""Files of rows as tests read them: in order, and each row at its place."""

from pathlib import Path
from typing import Any

from flows.config import PromptConfig, SourceConfig
from flows.records import BadRow, PromptRecord, RecordReader

TEXT = PromptConfig(format="text")


def make_reader(*sources: dict[str, Any], prompt: PromptConfig = TEXT) -> RecordReader:
    return RecordReader(tuple(SourceConfig.model_validate(source) for source in sources), prompt)


def read_source(
    path: Path | str, *, prompt: PromptConfig = TEXT, **source: Any
) -> list[PromptRecord | BadRow]:
    """Read all rows, and see that each is the same when it is read alone, in any order."""
    with make_reader({"path": path, **source}, prompt=prompt) as reader:
        rows = list(reader.read_all())
        for order in (rows, rows[::-1]):
            for row in order:
                again = reader.read_at(row.row_index, row.location)
                assert comparable(again) == comparable(row)
        assert reader.content_hash() == fresh_hash(path, prompt=prompt, **source)
    return rows


def fresh_hash(path: Path | str, *, prompt: PromptConfig = TEXT, **source: Any) -> dict[str, str]:
    """Return the content hash as a reader gives it that has read nothing else."""
    with make_reader({"path": path, **source}, prompt=prompt) as reader:
        return reader.content_hash()


def good(row: PromptRecord | BadRow) -> PromptRecord:
    assert isinstance(row, PromptRecord), row.error
    return row


def complaint(row: PromptRecord | BadRow) -> str:
    assert isinstance(row, BadRow), row
    return row.error.message


def comparable(row: PromptRecord | BadRow) -> tuple[Any, ...]:
    # repr, because NaN in a column is not equal to itself.
    place = (row.row_index, row.row_id, row.location, repr(row.columns))
    if isinstance(row, BadRow):
        return (*place, row.error.code, row.error.message)
    prompts = (row.prompt, repr(row.messages), row.prompt_token_ids)
    options = (row.turns, repr(row.sampling), row.priority, row.timeout_seconds)
    return (*place, *prompts, *options)
