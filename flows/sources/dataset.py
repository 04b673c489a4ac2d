"""A folder that `datasets` has written with save_to_disk: files of Arrow streams, in order."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from engine import ConfigError
from flows.source_config import is_url
from flows.sources.byte_streams import open_bytes
from flows.sources.tables import TableFile, check_names

STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"


class DatasetFolder(TableFile):
    """One dataset; its files are read as one table."""

    def batches_from(self, row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches from the one that holds the row; those before it are not unpacked."""
        first = 0
        for path in self._data_paths():
            with self._source(path) as source, self._open(path, source) as stream:
                check_names(path, stream.schema)
                for batch in stream:
                    if first + batch.num_rows > row:
                        yield first, batch
                    first += batch.num_rows

    def _data_paths(self) -> list[str]:
        state = self._read_state()
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ConfigError(
                f"{self._path}: the dataset's rows are chosen by an index beside them; write it "
                "with flatten_indices() and save_to_disk"
            )
        try:
            return [f"{self._path}/{file['filename']}" for file in state["_data_files"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{self._path}/{STATE_NAME}: lists no _data_files") from error

    def _read_state(self) -> dict[str, Any]:
        path = f"{self._path}/{STATE_NAME}"
        try:
            with open_bytes(path) as handle:
                state = msgspec.json.decode(handle.read())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
        return state if isinstance(state, dict) else {}

    def _source(self, path: str) -> Any:
        # A mapped file costs no memory, and a batch that is passed over no time.
        return open_bytes(path) if is_url(path) else pa.memory_map(path)

    def _open(self, path: str, source: Any) -> pa.RecordBatchStreamReader:
        try:
            return pa.ipc.open_stream(source)
        except pa.ArrowException as error:
            raise ConfigError(f"{path}: not a stream of Arrow: {error}") from error
