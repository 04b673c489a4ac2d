"""A model of one layer with its KV memory, and decode steps for it, without a scheduler.

Shapes are parameters: a kernel of some device may want its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import DeviceBackend
from engine.layers.decode_graphs import DecodeGraphs, GraphLimits, count_spare_blocks
from engine.layers.model_input import ModelInput
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

VOCAB_SIZE = 50
SPEC = SamplerSpec(
    seed=0, sampling_key=0, sample_index=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
)


@dataclass(frozen=True, kw_only=True)
class ToyShape:
    block_size: int = 4
    num_blocks: int = 64
    max_model_len: int = 600
    heads: tuple[int, int] = (4, 2)
    width: int = 8
    dtype: torch.dtype = torch.float32

    def limits(self, max_num_seqs: int) -> GraphLimits:
        return GraphLimits(
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )


class Toy:
    """The model and the memory, as a runner holds them."""

    def __init__(self, backend: DeviceBackend, shape: ToyShape, num_spare_blocks: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*sizes: int) -> torch.Tensor:
            drawn = torch.randn(*sizes, generator=generator)
            return drawn.to(shape.dtype).to(backend.device)

        num_heads, num_kv_heads = shape.heads
        hidden = num_heads * shape.width
        self.backend = backend
        self.shape = shape
        self.embeddings = weight(VOCAB_SIZE, hidden)
        self.positions = weight(shape.max_model_len, hidden)
        self.key, self.value = (weight(hidden, num_kv_heads * shape.width) / 4 for _ in range(2))
        self.head = weight(hidden, VOCAB_SIZE)
        num_blocks = shape.num_blocks + num_spare_blocks
        self.caches = tuple(
            weight(num_blocks, shape.block_size, num_kv_heads, shape.width) for _ in range(2)
        )
        self.num_calls = 0

    def forward(self, step: ModelInput) -> torch.Tensor:
        self.num_calls += 1
        num_heads, num_kv_heads = self.shape.heads
        hidden = self.embeddings[step.input_ids] + self.positions[step.positions]
        caches = (self.caches[0], self.caches[1])
        states = tuple(
            (hidden @ weight).view(-1, num_kv_heads, self.shape.width)
            for weight in (self.key, self.value)
        )
        self.backend.write_kv((states[0], states[1]), caches, step.attention.slot_mapping)
        query = hidden.view(-1, num_heads, self.shape.width)
        options = AttentionOptions(scale=self.shape.width**-0.5)
        attended = self.backend.attention(query, caches, step.attention, options)
        return (attended.flatten(1) @ self.head)[step.logit_rows].float()


@dataclass
class ToyRequest:
    block_ids: list[int]
    tokens: list[int]
    num_computed: int = 0


def toy_slot(uid: int) -> Slot:
    return Slot(
        uid=uid,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[],
        sampler=SPEC,
    )


def make_step(requests: Sequence[ToyRequest], toy: Toy, *, num_tokens: int = 1) -> ModelInput:
    """Return the step that computes the next tokens of each request, and note them as computed."""
    device, block_size = toy.backend.device, toy.shape.block_size
    ids, positions, slots, lens = [], [], [], []
    for request in requests:
        first = request.num_computed
        for position in range(first, first + num_tokens):
            ids.append(request.tokens[position])
            positions.append(position)
            block = request.block_ids[position // block_size]
            slots.append(block * block_size + position % block_size)
        request.num_computed += num_tokens
        lens.append(request.num_computed)
    width = max(len(request.block_ids) for request in requests)
    tables = [request.block_ids + [0] * (width - len(request.block_ids)) for request in requests]
    return ModelInput(
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        logit_rows=(torch.arange(1, len(requests) + 1) * num_tokens - 1).to(device),
        sampling=tuple(toy_slot(uid) for uid in range(len(requests))),
        scored=(),
        attention=AttentionMetadata(
            query_lens=[num_tokens] * len(requests),
            seq_lens=lens,
            slot_mapping=torch.tensor(slots, dtype=toy.backend.slot_dtype, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            seq_lens_tensor=torch.tensor(lens, dtype=torch.int32, device=device),
        ),
        extra={},
    )


def make_requests(count: int, shape: ToyShape, *, num_steps: int = 3) -> list[ToyRequest]:
    """Return requests of several lengths, their blocks strewn over the pool."""
    generator = torch.Generator().manual_seed(count)
    strewn = torch.randperm(shape.num_blocks, generator=generator).tolist()
    requests = []
    for uid in range(count):
        length = 3 + 5 * uid % 17
        num_blocks = -(-(length + num_steps) // shape.block_size)
        tokens = torch.randint(VOCAB_SIZE, (length + num_steps,), generator=generator).tolist()
        blocks = [strewn.pop() for _ in range(num_blocks)]
        requests.append(ToyRequest(blocks, tokens, num_computed=length))
    return requests


def make_graphs(
    backend: DeviceBackend, shape: ToyShape, max_num_seqs: int
) -> tuple[Toy, DecodeGraphs]:
    """Return a toy, and the graphs that were captured of it."""
    toy = Toy(backend, shape, count_spare_blocks(max_num_seqs, shape.block_size))
    graphs = DecodeGraphs(backend, toy.forward, shape.limits(max_num_seqs))
    graphs.capture()
    return toy, graphs


def assert_graphs_equal_eager_steps(
    backend: DeviceBackend,
    shape: ToyShape,
    max_num_seqs: int,
    *,
    tolerance: float | None = None,
) -> DecodeGraphs:
    """Compare steps of every batch size, large ones before small ones too."""
    toy, graphs = make_graphs(backend, shape, max_num_seqs)
    eager = Toy(backend, shape)
    for count in [*range(1, max_num_seqs + 1), *range(max_num_seqs, 0, -1)]:
        requests, same = make_requests(count, shape), make_requests(count, shape)
        for cache, other in zip(toy.caches, eager.caches, strict=True):
            other.copy_(cache[: shape.num_blocks])
        for _ in range(3):
            found = graphs.replay(make_step(requests, toy))
            wanted = eager.forward(make_step(same, eager))
            assert found is not None
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            if tolerance is None:
                assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert graphs.num_replayed == 3 * 2 * max_num_seqs
    assert graphs.num_eager_decodes == 0
    return graphs


def assert_padding_writes_nowhere(
    backend: DeviceBackend, shape: ToyShape, max_num_seqs: int
) -> None:
    """Compare the bits of the pool before and after steps of every batch size."""
    toy, graphs = make_graphs(backend, shape, max_num_seqs)
    for count in range(1, max_num_seqs + 1):
        for cache in toy.caches:
            cache.zero_()
        before = [cache.clone() for cache in toy.caches]
        step = make_step(make_requests(count, shape), toy)
        assert graphs.replay(step) is not None
        written = sorted(step.attention.slot_mapping.tolist())
        for cache, old in zip(toy.caches, before, strict=True):
            new, old = (pool[: shape.num_blocks].flatten(0, 1).cpu() for pool in (cache, old))
            changed = (new != old).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
            assert changed == written
