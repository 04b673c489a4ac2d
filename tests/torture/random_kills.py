"""Kills a job at random moments until it is finished, and checks all that must be true of it."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torture.builders import NUM_ROWS
from torture.invariants import Key, LedgerState, Row, check_state, read_state
from torture.trace import PHASES, Event, values
from torture.victims import JobUnderTest, Nursery, Outputs, Victim

Sample = tuple[str, int]  # row_id, sample_index
MakeMapping = Callable[[Path], dict[str, Any]]
# The job's process alone, with its workers, or a worker alone where there is one.
VICTIMS = ("process", "process group", "worker")
_MAX_KILLS_OF_A_JOB = 10
_LATE = ("exporting", "done")
# Phases by how often a moment is drawn in them; None is any time of the whole run.
_EARLY: Mapping[str | None, int] = {
    "starting": 2, "planning": 3, "loading": 3, "generating": 6, None: 3,
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """What was killed, in which phase of the job, and how many rows were done by then."""

    what: str
    phase: str
    num_done: int


@dataclass(frozen=True)
class Moment:
    """A random moment: so far into a phase, or into the whole run, as an undisturbed run goes."""

    phase: str | None
    fraction: float


@dataclass(frozen=True)
class Undisturbed:
    """The run that nobody disturbs: its outputs, and how long each phase takes."""

    outputs: Outputs
    phase_seconds: dict[str, float]

    def seconds_of(self, phase: str | None) -> float:
        """Return how long a phase takes, or the whole run."""
        if phase is None:
            return sum(self.phase_seconds.values())
        return self.phase_seconds[phase]


@dataclass
class Witness:
    """Remembers what the ledger held at each stop, and holds the job to it."""

    job: JobUnderTest
    num_rows: int = NUM_ROWS
    kept: dict[Key, tuple[Row, Row | None]] = field(default_factory=dict)
    done_before: list[set[Sample]] = field(default_factory=list)  # as each attempt began

    def note_start(self) -> None:
        """Remember what is done as another attempt begins."""
        done = {(row["row_id"], row["sample_index"]) for row, _ in self.kept.values()}
        self.done_before.append(done)

    def look(self) -> LedgerState:
        """Check the ledger as it stands; nothing that was ever in it may be gone or changed."""
        acknowledged = {tuple(key) for victim in self.job.victims for key in _committed(victim)}
        state = read_state(self.job.ledger_url)
        check_state(state, self.num_rows)
        answers = state.answers
        assert {key: answers.get(key) for key in self.kept} == self.kept
        assert acknowledged <= set(answers), "a commit that had returned is not there"
        self.kept = answers
        return state

    def check_the_end(self) -> Counter[Sample]:
        """Check the finished job; return how often each sample was generated."""
        state = self.look()
        assert state.job is not None
        assert state.job["state"] == "finished"
        samples = {key: (row["row_id"], key[1]) for key, row in state.completions.items()}
        generated: Counter[Sample] = Counter()
        for victim, done in zip(self.job.victims, self.done_before, strict=True):
            _check_order(victim.events(), set(done), samples)
            generated.update(map(tuple, values(victim.events(), "answered")))
        committed = Counter(tuple(key) for v in self.job.victims for key in _committed(v))
        assert max(committed.values(), default=1) == 1, "a result was committed twice"
        return generated


def _committed(victim: Victim) -> list[list[int]]:
    return [key for keys in values(victim.events(), "committed") for key in keys]


def _check_order(events: Iterable[Event], done: set[Sample], samples: dict[Key, Sample]) -> None:
    """Check that nothing is generated after its commit, in this attempt or in one before."""
    for event in events:
        if event.name == "committed":
            done |= {samples[row_index, sample_index] for row_index, sample_index in event.value}
        elif event.name == "asked":
            again = done.intersection(map(tuple, event.value))
            assert not again, f"{again} were generated after their commit"


def torture(
    folder: Path,
    make_mapping: MakeMapping,
    nursery: Nursery,
    numbers: random.Random,
    *,
    num_kills: int,
    victims: Sequence[str] = VICTIMS,
) -> list[Kill]:
    """Kill jobs, one after the other, so many times in all, and check all that must be true."""
    undisturbed = run_undisturbed(folder / "undisturbed", make_mapping, nursery)
    kills: list[Kill] = []
    while len(kills) < num_kills:
        job_folder = folder / f"after-{len(kills)}-kills"
        job_folder.mkdir()
        job = JobUnderTest(job_folder, make_mapping(job_folder), nursery)
        siege = _Siege(job, undisturbed, numbers, victims)
        kills += siege.run(min(_MAX_KILLS_OF_A_JOB, max(4, num_kills - len(kills))))
    return kills


def run_undisturbed(folder: Path, make_mapping: MakeMapping, nursery: Nursery) -> Undisturbed:
    """Run the job once without a kill."""
    folder.mkdir(parents=True)
    job = JobUnderTest(folder, make_mapping(folder), nursery)
    victim = job.start()
    assert victim.wait() in (0, 1), victim.said
    begins = [(e.value, e.seconds) for e in victim.events() if e.name == "phase"]
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.02)
    for (phase, start), (_, end) in zip(begins, begins[1:], strict=False):
        seconds[phase] += end - start
    return Undisturbed(job.outputs(), seconds)


def draw_moments(numbers: random.Random, count: int) -> list[Moment]:
    """Draw moments for one job; those after the last row come last."""
    num_late = max(1, count // 4)
    early = numbers.choices(list(_EARLY), list(_EARLY.values()), k=count - num_late)
    late = sorted(numbers.choices(_LATE, (3, 1), k=num_late), key=PHASES.index)
    return [Moment(phase, numbers.random()) for phase in (*early, *late)]


class _Siege:
    """One job that is killed until it is finished."""

    def __init__(
        self,
        job: JobUnderTest,
        undisturbed: Undisturbed,
        numbers: random.Random,
        victims: Sequence[str],
    ) -> None:
        self._job = job
        self._undisturbed = undisturbed
        self._numbers = numbers
        self._victims = victims
        self._witness = Witness(job)
        self._kills: list[Kill] = []
        self._running: Victim | None = None  # one that has lost a worker
        self._is_finished = False

    def run(self, num_moments: int) -> list[Kill]:
        """Kill the job at so many moments, as far as it is there, and let it end."""
        for moment in draw_moments(self._numbers, num_moments):
            if not (self._is_finished and moment.phase in ("loading", "generating")):
                self._strike(moment)
        if self._running is not None:
            self._running.wait()
        last = self._start()
        assert last.wait() in (0, 1), last.said
        self._witness.check_the_end()
        assert self._job.outputs() == self._undisturbed.outputs
        return self._kills

    def _strike(self, moment: Moment) -> None:
        """Kill the job, or a worker of it, at a moment, if it is still there by then."""
        what = self._numbers.choice(self._victims)
        victim, is_there = self._wait_for(moment)
        self._running = None
        if is_there and what == "worker" and self._kill_worker(victim):
            self._note(what, victim)
            self._running = victim
        elif is_there and victim.kill(whole_group=what != "process"):
            victim.wait_for_workers()
            self._note("process" if what == "process" else "process group", victim)
        else:
            self._is_finished = self._has_finished(victim)

    def _start(self) -> Victim:
        self._witness.note_start()
        return self._job.start()

    def _wait_for(self, moment: Moment) -> tuple[Victim, bool]:
        """Start a process, unless one is there; tell whether it is still there at the moment."""
        phase, victim = moment.phase, self._running
        if victim is not None:
            phase = "generating"
        else:
            victim = self._start()
            if phase is not None and not victim.wait_until(lambda: victim.is_in(phase)):
                return victim, False
        time.sleep(moment.fraction * self._undisturbed.seconds_of(phase))
        return victim, victim.exit_code is None

    def _kill_worker(self, victim: Victim) -> bool:
        """Kill a worker alone, if there is one and none was killed just before."""
        workers = victim.workers()
        # A second death in a row may be put down to the rows that were in flight both times.
        if not workers or read_state(self._job.ledger_url).suspects:
            return False
        with suppress(psutil.NoSuchProcess):
            self._numbers.choice(workers).kill()
        return True

    def _note(self, what: str, victim: Victim) -> None:
        num_done = len(self._witness.look().completions)
        self._kills.append(Kill(what, victim.phase, num_done))

    def _has_finished(self, victim: Victim) -> bool:
        """Tell whether a process that ended by itself has finished the job."""
        code = victim.wait()
        last = self._kills[-1] if self._kills else None
        # Nobody starts a worker again that was killed before it was ready; the next run does.
        is_start_failure = (
            last is not None
            and last.what == "worker"
            and (last.phase == "loading" or "the engine could not start" in victim.said)
        )
        assert code in ((0, 1, 3) if is_start_failure else (0, 1)), victim.said
        return code != 3


def spread(kills: list[Kill]) -> str:
    """Return a table: how many kills of what fell into which phase of the job."""
    kinds = sorted({kill.what for kill in kills})
    counts = Counter((kill.phase, kill.what) for kill in kills)
    lines = [f"{'phase':12}" + "".join(f"{kind:>15}" for kind in kinds) + f"{'all':>6}"]
    for phase in PHASES:
        of_phase = [counts[phase, kind] for kind in kinds]
        lines.append(f"{phase:12}" + "".join(f"{n:15}" for n in of_phase) + f"{sum(of_phase):6}")
    return "\n".join(lines)
