"""Runs a sample of a job's rows again and compares: `tokenmill verify`.

The rows are asked as the job has asked them, with its configuration and its seed. Nothing is
written to the ledger.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from engine import (
    ConfigError,
    GenerateRequest,
    LedgerError,
    ModelSource,
    OfflineInference,
    SamplingParams,
    Tokenizer,
)
from flows.answer_comparison import Difference, find_difference
from flows.config import JobConfig
from flows.job_changes import find_model_changes
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow
from flows.planner import plan_job
from flows.preparation import default_sampling, job_dir_of
from flows.records import BadRow, RecordReader
from flows.row_choice import SampleSize, choose_rows
from flows.row_index import IndexRow, RowIndex
from flows.row_indexer import RowIndexer
from flows.row_sampling import RowSampling
from flows.stacks import StackPool

# The stored token is looked for among so many likeliest ones; further down it was no near tie.
_NUM_LOGPROBS = 8
_TOLERANCE_OF_ROUNDING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What came out. unverified are ids of rows that could not be run again, each with the reason.

    texts_of_tokens are the texts of the tokens in differences.
    """

    job_id: str
    seed: int
    num_ok_rows: int
    num_verified: int
    tolerance: float
    differences: tuple[Difference, ...]
    unverified: tuple[tuple[str, str], ...]
    texts_of_tokens: dict[int, str]

    @property
    def num_differing(self) -> int:
        """Rows with at least one sample that differs."""
        return len({difference.row_index for difference in self.differences})

    @property
    def share(self) -> float:
        """Share of the verified rows that differ."""
        return self.num_differing / self.num_verified if self.num_verified else 0.0

    @property
    def has_passed(self) -> bool:
        """True when rows were verified, and not too many of them differ."""
        return self.num_verified > 0 and self.share <= self.tolerance


def default_tolerance(config: JobConfig) -> float:
    """Return which share may differ: none in deterministic mode, else what rounding may do."""
    return 0.0 if config.engine.deterministic else _TOLERANCE_OF_ROUNDING


def verify_job(
    config: JobConfig,
    job: JobRow,
    ledger: Ledger,
    *,
    size: SampleSize,
    seed: int,
    tolerance: float | None = None,
) -> VerifyReport:
    """Run rows of a job again, chosen by `seed` among those that are ok, and compare.

    Raises:
        ConfigError: a source or the model is not there.
        LedgerError: no row is ok, or another model would answer.
        WorkerError: a worker failed.
    """
    source = ModelSource.inspect(config.engine)
    tokenizer = Tokenizer.load(config.engine, source)
    _refuse_another_model(job, source.fingerprint() | tokenizer.fingerprint())
    num_ok_rows, chosen = choose_rows(ledger, job, size, seed)
    with RecordReader(config.sources, config.prompt) as reader:
        asker = _Asker(config, job, reader, tokenizer, source)
        rerun = _Rerun(ledger, job, asker)
        with closing(StackPool.of_job(config)) as stacks, stacks.borrow() as slot:
            differences = rerun.compare(slot.engine(), chosen)
    tokens = {d.stored_token for d in differences} | {d.new_token for d in differences}
    return VerifyReport(
        job_id=job.job_id,
        seed=seed,
        num_ok_rows=num_ok_rows,
        num_verified=rerun.num_asked,
        tolerance=default_tolerance(config) if tolerance is None else tolerance,
        differences=tuple(differences),
        unverified=tuple(rerun.unverified),
        texts_of_tokens={t: tokenizer.token_text(t) for t in tokens if t is not None},
    )


class _Asker:
    """Makes the request of a row as the job has made it."""

    def __init__(
        self,
        config: JobConfig,
        job: JobRow,
        reader: RecordReader,
        tokenizer: Tokenizer,
        source: ModelSource,
    ) -> None:
        self.config = config
        self.reader = reader
        self.tokenizer = tokenizer
        self.max_model_len = source.max_model_len
        self.default_sampling = default_sampling(config, source)
        seed = self.default_sampling.seed
        self._sampling = RowSampling(
            self.default_sampling.overlaid({"seed": job.seed if seed is None else seed})
        )
        self._indexer = RowIndexer(
            reader,
            tokenizer,
            self.default_sampling,
            max_model_len=self.max_model_len,
            too_long=config.too_long,
            deduplicate=False,
        )

    def ask(self, row: IndexRow | None, stored: CompletionRow) -> GenerateRequest | None:
        """Return the request; None when the row is not there, or not what was asked."""
        if row is None:
            return None
        try:
            record = self.reader.read_at(row.row_index, row.location)
        except ConfigError:
            return None
        if isinstance(record, BadRow) or record.row_id != stored.row_id:
            return None
        indexed = self._indexer.index(record)
        # A ledger of an older tokenmill has no hash; then the id has to do.
        is_other = stored.request_hash not in (None, indexed.request_hash)
        if is_other or indexed.error_code is not None:
            return None
        params = self._sampling.of(
            record, truncate_prompt_tokens=indexed.truncate_prompt_tokens
        ).params
        return record.to_request(_with_logprobs(params))


class _Rerun:
    """Asks chosen rows again, in a thread of the engine, and compares in its own."""

    def __init__(self, ledger: Ledger, job: JobRow, asker: _Asker) -> None:
        self._ledger = ledger
        self._job = job
        self._asker = asker
        self._stored: dict[str, dict[int, CompletionRow]] = {}
        self.num_asked = 0
        self.unverified: list[tuple[str, str]] = []

    def compare(self, engine: OfflineInference, chosen: Sequence[int]) -> list[Difference]:
        """Return what differs, in the order of the rows."""
        is_exact = self._asker.config.engine.deterministic
        found = []
        with closing(engine.run(self._requests(chosen))) as completions:
            for completion in completions:
                samples = self._stored[completion.request_id]
                stored = samples.pop(completion.sample_index)
                if not samples:
                    del self._stored[completion.request_id]
                difference = find_difference(stored, completion, is_exact=is_exact)
                if difference is not None:
                    found.append(difference)
        return sorted(found, key=lambda d: (d.row_index, d.sample_index))

    def _requests(self, chosen: Sequence[int]) -> Iterator[GenerateRequest]:
        with _RowFinder(self._asker, self._job) as finder:
            for row_index in chosen:
                samples = self._ledger.read_rows(self._job.job_key, [row_index])
                request = self._asker.ask(finder.at(row_index), samples[0])
                if request is None:
                    request = self._asker.ask(finder.named(samples[0].row_id), samples[0])
                if request is None:
                    reason = "the input does not have the row that was asked any more"
                    self.unverified.append((samples[0].row_id, reason))
                    continue
                self.num_asked += 1
                self._stored[request.request_id] = {s.sample_index: s for s in samples}
                yield request


class _RowFinder:
    """Finds rows of the input: where the job's index has them, or, when they moved, by a new one."""

    def __init__(self, asker: _Asker, job: JobRow) -> None:
        self._asker = asker
        self._exit_stack = ExitStack()
        self._planned = self._open_planned(job.num_rows)
        self._current: RowIndex | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit_stack.close()

    def at(self, row_index: int) -> IndexRow | None:
        """Return the row where it was planned; None when the job's index is gone."""
        if self._planned is None:
            return None
        return next(self._planned.rows_between(row_index, row_index + 1), None)

    def named(self, row_id: str) -> IndexRow | None:
        """Return the row of the input as it is now; the first call reads all of it."""
        if self._current is None:
            self._current = self._exit_stack.enter_context(RowIndex.open(self._plan_anew()))
        return self._current.find([row_id]).get(row_id)

    def _open_planned(self, num_rows: int) -> RowIndex | None:
        try:
            index = RowIndex.open(job_dir_of(self._asker.config) / "rows.sqlite")
        except ConfigError:
            return None
        self._exit_stack.enter_context(index)
        return index if index.count == num_rows else None

    def _plan_anew(self) -> Path:
        folder = self._exit_stack.enter_context(TemporaryDirectory(prefix="tokenmill-verify-"))
        asker = self._asker
        plan = plan_job(
            asker.config,
            asker.reader,
            asker.tokenizer,
            max_model_len=asker.max_model_len,
            index_path=Path(folder) / "rows.sqlite",
            default_sampling=asker.default_sampling,
        )
        return plan.index_path


def _refuse_another_model(job: JobRow, fingerprint: dict[str, str]) -> None:
    changes = find_model_changes(job, fingerprint)
    if changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise LedgerError(
            f"job {job.job_id!r} cannot be verified: another model would answer\n{listed}\n"
            "put the old values back"
        )


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    if params.is_scoring_only:
        return params
    return params.overlaid({"logprobs": max(params.logprobs or 0, _NUM_LOGPROBS)})
