"""What captured graphs gain on a device: decode steps a second of the whole engine, with and without.

`python tests/bench/decode_graphs.py --device cuda` answers batches of several sizes with a random
model, or with that of --model-path, by an engine that replays graphs and by one that launches every
kernel, in turn, and prints the best of each and the ratio. The seconds are those in which a step
was in flight, prompts included. On the CPU there are no graphs, and it says so.
"""

# ruff: noqa: E402 - the path to the tests' own modules comes first

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import tiny_model

from engine import OfflineInference, SamplingParams
from engine.backends import load_backend
from engine.backends.base import DeviceBackend
from engine.config import EngineConfig
from engine.errors import TokenmillError

HEAD_DIM = 128  # what every device's kernels are documented for


def main() -> None:
    """Measure every batch size in turn, and print the ratios."""
    options = _parse_arguments()
    try:
        backend = load_backend(options.device)
        backend.check_device(0)
        print(f"on {backend.bind(0, None)}")
    except TokenmillError as error:
        sys.exit(str(error))
    if not backend.has_graphs:
        print(f"device {backend.name} has no graphs: there is nothing to compare")
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model_path = options.model_path or _save_model(Path(folder), options)
        plain, graphed = (
            stack.enter_context(_open(model_path, backend, options, enforce_eager=eager))
            for eager in (True, False)
        )
        print(
            f"{'batch':>5} {'eager steps/s':>14} {'graph steps/s':>14} {'ratio':>6} {'replayed':>9}"
        )
        for batch in options.batches:
            best = {plain: 0.0, graphed: 0.0}
            replayed = 0.0
            for _ in range(options.rounds):
                for engine in best:
                    rate, replayed = _measure(engine, batch, options)
                    best[engine] = max(best[engine], rate)
            ratio = best[graphed] / best[plain]
            print(
                f"{batch:>5} {best[plain]:>14.1f} {best[graphed]:>14.1f} {ratio:>6.2f} "
                f"{replayed:>9.1%}",
                flush=True,
            )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--model-path", type=Path, help="a model folder, not a random model")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _save_model(folder: Path, options: argparse.Namespace) -> Path:
    hidden_size = options.heads * HEAD_DIM
    return tiny_model.save_tiny_llama(
        folder,
        dtype=torch.bfloat16,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 4),
        head_dim=HEAD_DIM,
        max_position_embeddings=_num_tokens(options),
        initializer_range=0.02,
    )


def _num_tokens(options: argparse.Namespace) -> int:
    return int(options.prompt_tokens + options.tokens)


def _open(
    model_path: Path, backend: DeviceBackend, options: argparse.Namespace, *, enforce_eager: bool
) -> OfflineInference:
    block_size = backend.capabilities.default_block_size
    most = max(options.batches)
    config = {
        "model_path": str(model_path),
        "device": backend.name,
        "dtype": "bfloat16",
        "enforce_eager": enforce_eager,
        "max_model_len": _num_tokens(options),
        "runtime": {"inline": True},
        "cache": {
            "num_blocks": (most + 1) * -(-_num_tokens(options) // block_size),
            "enable_prefix_caching": False,
        },
        "scheduler": {
            "max_num_seqs": most,
            "max_num_batched_tokens": max(2048, most * options.prompt_tokens),
        },
    }
    return OfflineInference(EngineConfig.model_validate(config))


def _measure(
    engine: OfflineInference, batch: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Return steps a second of a batch, and the share of decode steps that were replayed."""
    prompts = [[row % 100 + 5] * options.prompt_tokens for row in range(batch)]
    engine.take_stats()
    engine.generate(
        prompts, SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    )
    stats = engine.take_stats()
    return stats.num_steps / stats.busy_seconds, stats.num_graph_steps / stats.num_decode_steps


if __name__ == "__main__":
    main()
