"""Parquet, read batch by batch."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from engine import ConfigError
from flows.sources.byte_streams import open_bytes
from flows.sources.tables import TableFile, check_names

_BATCH_ROWS = 1000


class ParquetFile(TableFile):
    """One Parquet file, local or behind a URL."""

    def batches_from(self, row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches from the row group that holds the row."""
        with open_bytes(self._path) as handle:
            file = self._open(handle)
            ends = list(accumulate(self._group_sizes(file)))
            group = bisect_right(ends, row)
            first = ends[group - 1] if group else 0
            groups = list(range(group, len(ends)))
            # Without threads: the cores are the engine's. Without a buffer in advance, which holds
            # a whole row group.
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False):
                yield first, batch
                first += batch.num_rows

    def num_rows(self) -> int:
        """Return what the file says of itself."""
        with open_bytes(self._path) as handle:
            return int(self._open(handle).metadata.num_rows)

    def _open(self, handle: object) -> pq.ParquetFile:
        try:
            file = pq.ParquetFile(handle, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{self._path}: not a Parquet file: {error}") from error
        check_names(self._path, file.schema_arrow)
        return file

    def _group_sizes(self, file: pq.ParquetFile) -> Iterator[int]:
        metadata = file.metadata
        return (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
