"""What fused decoder layers gain on the CPU: decode steps of the demo's model, with and without.

`python tests/bench/fused_layers.py` runs both kinds in one process, in turn, so that what else the
machine does falls on both, and prints the least processor time of a step with the layers of
transformers over that with fused ones. `make demo` makes the model.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.cpu import CpuBackend
from engine.layers.kv_pool import allocate_pool
from engine.models import LoadedModel, load_model
from engine.parallel import ParallelGroup

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16


class WithoutFusedLayers(CpuBackend):
    prefers_fused_layers = False


class WithFusedLayers(CpuBackend):
    prefers_fused_layers = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of `batch` requests that compute `num_new` tokens behind `num_old` others each."""

    batch: int
    num_old: int
    num_new: int

    @property
    def num_blocks(self) -> int:
        return -(-(self.num_old + self.num_new) // BLOCK_SIZE)


def main() -> None:
    """Time every step in turn, and print the ratios."""
    options = _parse_arguments()
    torch.set_num_threads(options.threads)
    decode = [Step(batch=n, num_old=options.context, num_new=1) for n in options.batches]
    steps = [*decode, Step(batch=1, num_old=0, num_new=options.context)]
    num_blocks = max(step.batch * step.num_blocks for step in steps)
    kinds = (WithoutFusedLayers(), WithFusedLayers())
    models = [_load(backend, options.demo_dir, options.dtype, num_blocks) for backend in kinds]
    print(f"{options.dtype}, {options.threads} threads, {options.context} tokens each")
    print(f"{'step':<12} {'plain ms':>9} {'fused ms':>9} {'ratio':>6}  ratios of a round, middle half")
    for step in steps:
        times = _alternate(models, step, options.rounds)
        low, _, high = statistics.quantiles([plain / fused for plain, fused in times], n=4)
        # What else the machine does only adds to a time.
        plain, fused = (1e3 * min(kind) for kind in zip(*times, strict=True))
        name = f"decode {step.batch}" if step.num_new == 1 else f"prefill {step.num_new}"
        print(
            f"{name:<12} {plain:9.1f} {fused:9.1f} {plain / fused:6.3f}  {low:.3f} to {high:.3f}",
            flush=True,
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="1 on a machine that others use too")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--demo-dir", type=Path, default=ROOT / ".demo")
    return parser.parse_args()


def _load(backend: CpuBackend, demo_dir: Path, dtype: str, num_blocks: int) -> LoadedModel:
    backend.bind(0, torch.get_num_threads())
    model = load_model(
        demo_dir / "SmolLM2-135M-Instruct",
        dtype=dtype,
        backend=backend,
        group=ParallelGroup(),
        trust_remote_code=False,
    )
    caches = allocate_pool(num_blocks, BLOCK_SIZE, model.kv_layouts, model.dtype, backend)
    model.attention.bind_caches(caches)
    return model


def _alternate(models: list[LoadedModel], step: Step, rounds: int) -> list[list[float]]:
    """Return the seconds of each kind, round by round; the first round warms up."""
    times = []
    for number in range(rounds + 1):
        order = [0, 1] if number % 2 else [1, 0]
        seconds = dict.fromkeys(order, 0.0)
        for kind in order:
            seconds[kind] = _time(models[kind], step)
        times.append([seconds[0], seconds[1]])
    return times[1:]


@torch.inference_mode()
def _time(model: LoadedModel, step: Step) -> float:
    total = step.num_old + step.num_new
    tables = torch.arange(step.batch * step.num_blocks, dtype=torch.int32)
    tables = tables.view(step.batch, step.num_blocks)
    positions = torch.arange(step.num_old, total).repeat(step.batch)
    requests = torch.arange(step.batch).repeat_interleave(step.num_new)
    blocks = tables[requests, positions // BLOCK_SIZE].long()
    metadata = AttentionMetadata(
        query_lens=[step.num_new] * step.batch,
        seq_lens=[total] * step.batch,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables=tables,
        seq_lens_tensor=torch.full((step.batch,), total, dtype=torch.int32),
    )
    last = torch.arange(step.num_new - 1, len(positions), step.num_new)
    started = time.process_time()
    with model.attention.step(metadata):
        model.logits(torch.ones_like(positions), positions, last)
    return time.process_time() - started


if __name__ == "__main__":
    main()
