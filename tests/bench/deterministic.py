"""What `deterministic: true` keeps and costs, on real prompts and the demo's model.

`python tests/bench/deterministic.py` answers the same prompts in every schedule, twice: in the
deterministic mode, where tokens and log probabilities must be equal to the last bit, and in the
fast mode, where each text that differs must begin to do so at a near tie of the two likeliest
tokens. It prints times as ratios of one run, and ends with an error when a claim does not hold.
`make demo` makes the model and the prompts.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import Completion, EngineConfig, OfflineInference, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = ("Complete this Python function.", "Write a test for this Python function.")
# Differences of log probabilities that rounding can turn round: bfloat16 keeps 8 bits of a logit.
NEAR_TIE = {"bfloat16": 0.5, "float32": 0.01}
REFERENCE = "batch 64"
VARIATIONS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "batch 8": {"scheduler": {"max_num_seqs": 8}},
    "batch 1": {"scheduler": {"max_num_seqs": 1}},
    "other order": {"scheduler": {"order": "longest_first"}},
    "chunks of 96": {"scheduler": {"max_num_batched_tokens": 96}},
    "preemption": {"cache": {"block_size": 1, "num_blocks": 1500, "enable_prefix_caching": False}},
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
    "two steps in flight": {"scheduler": {"num_steps_in_flight": 2}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The answers of one schedule, and the seconds that they took once the model was loaded."""

    completions: list[Completion]
    seconds: float

    @property
    def num_preemptions(self) -> int:
        return sum(completion.num_preemptions for completion in self.completions)


def main() -> int:
    """Run everything, print the table; return 1 when a claim does not hold."""
    options = _parse_arguments()
    prompts = list(_prompts(options.demo_dir, options.prompts))
    names = [REFERENCE, *[name for name in options.only or VARIATIONS if name != REFERENCE]]
    faults: list[str] = []
    references: dict[bool, Run] = {}
    print(f"{len(prompts)} prompts x {options.tokens} tokens, {options.dtype}")
    print(f"{'schedule':<20} {'exact s':>8} {'fast s':>8} {'ratio':>6}  fast texts that differ")
    total = {True: 0.0, False: 0.0}
    for name in names:
        runs = {
            is_exact: _answer(prompts, options, VARIATIONS[name], is_exact=is_exact)
            for is_exact in (True, False)
        }
        for is_exact, run in runs.items():
            references.setdefault(is_exact, run)
            total[is_exact] += run.seconds
        faults += _bit_faults(name, references[True], runs[True])
        margins, tie_faults = _divergences(name, references[False], runs[False], options.dtype)
        faults += tie_faults
        _print_row(name, runs, margins, len(prompts))
    print(f"deterministic / fast, all schedules: {total[True] / total[False]:.2f}")
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(NEAR_TIE), default="bfloat16")
    parser.add_argument("--threads", type=int, help="1 on a machine that others use too")
    parser.add_argument("--demo-dir", type=Path, default=ROOT / ".demo")
    parser.add_argument("--only", nargs="*", choices=list(VARIATIONS), help="some schedules only")
    return parser.parse_args()


def _prompts(demo_dir: Path, count: int) -> Iterator[list[dict[str, str]]]:
    with (demo_dir / "humaneval.jsonl").open(encoding="utf-8") as lines:
        functions = [json.loads(line)["prompt"] for line in lines]
    every = [f"{instruction}\n{function}" for instruction in INSTRUCTIONS for function in functions]
    for text in every[:count]:
        yield [{"role": "user", "content": text}]


def _answer(
    prompts: Sequence[list[dict[str, str]]],
    options: argparse.Namespace,
    sections: dict[str, Any],
    *,
    is_exact: bool,
) -> Run:
    settings = {
        "model_path": str(options.demo_dir / "SmolLM2-135M-Instruct"),
        "device": "cpu",
        "dtype": options.dtype,
        "deterministic": is_exact,
        "runtime": {"num_threads": options.threads},
        "scheduler": sections.get("scheduler", {}),
        "cache": {"kv_cache_gib": 1.0, **sections.get("cache", {})},
    }
    if "max_num_batched_tokens" in settings["scheduler"]:
        settings["scheduler"] = {"max_num_seqs": 64, **settings["scheduler"]}
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, logprobs=2)
    with OfflineInference(EngineConfig.model_validate(settings)) as llm:
        started = time.perf_counter()
        completions = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
    failed = [completion.error for completion in completions if completion.error]
    assert not failed, failed[0]
    return Run(completions=completions, seconds=seconds)


def _bit_faults(name: str, reference: Run, run: Run) -> list[str]:
    differing = [
        index
        for index, (one, other) in enumerate(
            zip(reference.completions, run.completions, strict=True)
        )
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs)
    ]
    faults = [f"{name}: deterministic rows {differing} differ"] if differing else []
    if name == "preemption" and run.num_preemptions == 0:
        faults.append("preemption: nothing was preempted, give it fewer blocks")
    return faults


def _divergences(name: str, reference: Run, run: Run, dtype: str) -> tuple[list[float], list[str]]:
    """Return how near the tie was where each differing text begins to differ, and the faults."""
    margins: list[float] = []
    faults: list[str] = []
    for index, (one, other) in enumerate(zip(reference.completions, run.completions, strict=True)):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        position = next((i for i, (left, right) in pairs if left != right), None)
        if position is None:
            continue
        assert one.logprobs is not None
        top = one.logprobs[position].top
        margins.append(top[0][1] - top[1][1])
        if margins[-1] > NEAR_TIE[dtype]:
            faults.append(f"{name}: fast row {index} differs at a margin of {margins[-1]:.3f}")
    return margins, faults


def _print_row(name: str, runs: dict[bool, Run], margins: list[float], num_rows: int) -> None:
    exact, fast = runs[True], runs[False]
    share = f"{len(margins) / num_rows:6.1%}"
    widest = f", margin at most {max(margins):.4f}" if margins else ""
    print(
        f"{name:<20} {exact.seconds:8.1f} {fast.seconds:8.1f} "
        f"{exact.seconds / fast.seconds:6.2f}  {share}{widest}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
