"""What fused decoder layers gain on the CPU: decode steps of the demo's model, with and without.

`python tests/bench/fused_layers.py` runs both kinds in one process, in turn, and prints the time of
a step's decoder layers as transformers has them over that of fused ones. What else the machine does
only adds to a time, and hardly ever to every run of the same layer: so a step's time is the sum of
each layer's least processor time. `make demo` makes the model.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.cpu import CpuBackend
from engine.layers.kv_pool import allocate_pool
from engine.layers.loaded_model import LoadedModel
from engine.models import load_model
from engine.parallel import ParallelGroup

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16


class WithoutFusedLayers(CpuBackend):
    prefers_fused_layers = False


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
    kinds = (WithoutFusedLayers(), CpuBackend())
    models = [_load(backend, options.demo_dir, options.dtype, num_blocks) for backend in kinds]
    print(f"{options.dtype}, {options.threads} threads, {options.context} tokens each")
    print(f"{'step':<12} {'plain ms':>9} {'fused ms':>9} {'ratio':>6}")
    for step in steps:
        plain, fused = (1e3 * seconds for seconds in _alternate(models, step, options.rounds))
        name = f"decode {step.batch}" if step.num_new == 1 else f"prefill {step.num_new}"
        print(f"{name:<12} {plain:9.1f} {fused:9.1f} {plain / fused:6.3f}", flush=True)


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


def _alternate(models: list[LoadedModel], step: Step, rounds: int) -> list[float]:
    """Return the seconds of each kind."""
    least = [[float("inf")] * len(model.module.model.layers) for model in models]
    for number in range(2 * rounds):
        kind = number % 2
        times = _time_layers(models[kind], step)
        least[kind] = [min(pair) for pair in zip(least[kind], times, strict=True)]
    return [sum(seconds) for seconds in least]


def _time_layers(model: LoadedModel, step: Step) -> list[float]:
    """Return the seconds of each layer in one step."""
    started: list[float] = []
    ended: list[float] = []
    hooks = []
    for layer in model.module.model.layers:
        before = layer.register_forward_pre_hook(lambda *_: started.append(time.process_time()))
        after = layer.register_forward_hook(lambda *_: ended.append(time.process_time()))
        hooks += [before, after]
    try:
        _run(model, step)
    finally:
        for hook in hooks:
            hook.remove()
    return [end - start for start, end in zip(started, ended, strict=True)]


@torch.inference_mode()
def _run(model: LoadedModel, step: Step) -> None:
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
    with model.attention.step(metadata):
        model.logits(torch.ones_like(positions), positions, last)


if __name__ == "__main__":
    main()
