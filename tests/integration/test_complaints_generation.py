"""What makes an answer wrong elsewhere: preemption, caches, neighbours, samples, early ends.

Each test takes the case that users have reported of some engine, and its neighbours.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import open_engine
from transformers import LlamaForCausalLM

from engine import (
    Completion,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    StreamedToken,
)

pytestmark = pytest.mark.integration

PROMPT = [0, *range(50, 70)]
EOS = 1
SECOND_EOS = 90
MAX_TOKENS = 24
# Short, so that two turns have room in the KV of one request and a half.
CHAT = {"chat": {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}}


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0, "max_tokens": MAX_TOKENS} | values)


def drawn(**values: Any) -> SamplingParams:
    return sampling(**{"temperature": 0.9, "top_p": 0.95, "seed": 7} | values)


def request(request_id: str, prompt: list[int], params: SamplingParams, **more: Any) -> Any:
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **more
    )


def assert_same(one: Completion, other: Completion) -> None:
    """Compare all that the caller gets; log probabilities up to rounding."""
    for name in ("text", "token_ids", "finish_reason", "error", "num_prompt_tokens"):
        assert getattr(one, name) == getattr(other, name), name
    assert [r.token_ids for r in one.replies] == [r.token_ids for r in other.replies]
    for name in ("logprobs", "prompt_logprobs"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) is (right is None)
        for mine, theirs in zip(left or (), right or (), strict=True):
            assert (mine is None) is (theirs is None)
            if mine is not None:
                assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[OfflineInference]:
    with open_engine(tiny_llama, CHAT) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(engine: OfflineInference) -> Completion:
    """What the model says to PROMPT when nothing ends it."""
    [completion] = engine.generate([PROMPT], sampling(ignore_eos=True))
    return completion


@pytest.fixture(scope="module")
def two_eos(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OfflineInference]:
    """The same model with a second EOS, known from its generation_config alone."""
    folder = tmp_path_factory.mktemp("two-eos") / "model"
    shutil.copytree(tiny_llama, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [EOS, SECOND_EOS]}))
    with open_engine(folder) as llm:
        yield llm


# Preemption: KV for one request and a half, and a rival that goes first.

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}


def preempted_kinds(plain: Completion) -> dict[str, dict[str, Any]]:
    """Return what a request has to keep through a preemption, one kind after the other."""
    stop = plain.text[-12:-9]
    assert stop.isprintable()
    return {
        "greedy": {"sampling_params": sampling(ignore_eos=True)},
        "stop string": {"sampling_params": sampling(stop=stop, ignore_eos=True)},
        "stop string after min_tokens": {
            "sampling_params": sampling(stop=plain.text[2:4], min_tokens=16, ignore_eos=True)
        },
        "penalties": {"sampling_params": sampling(min_tokens=20, **PENALTIES)},
        "draws": {"sampling_params": drawn(min_tokens=20, logprobs=2, **PENALTIES)},
        "samples": {"sampling_params": drawn(n=2, ignore_eos=True)},
        "scores": {"sampling_params": sampling(prompt_logprobs=1, logprobs=1, ignore_eos=True)},
        "bad words and biases": {
            "sampling_params": sampling(
                bad_words=(plain.text[:2],), logit_bias={60: 3.0, 61: -5.0}, min_tokens=20
            )
        },
        "end at EOS": {
            "sampling_params": sampling(logit_bias={EOS: 100}, min_tokens=18, logprobs=0)
        },
        "turns": {
            "prompt_token_ids": None,
            "messages": [
                {"role": "user", "content": "the quick brown fox jumps over the lazy dog"}
            ],
            "turns": ("and the",),
            # Short: what was drawn is encoded anew as part of the second prompt, and may be longer.
            "sampling_params": drawn(max_tokens=16, ignore_eos=True),
        },
    }


@pytest.mark.parametrize(
    ("num_steps_in_flight", "enable_prefix_caching"), [(1, True), (2, True), (2, False)]
)
def test_a_preempted_answer_is_the_one_that_was_never_preempted(
    tiny_llama: Path,
    engine: OfflineInference,
    plain: Completion,
    num_steps_in_flight: int,
    enable_prefix_caching: bool,
) -> None:
    num_blocks = (len(PROMPT) + MAX_TOKENS) * 3 // 2 // 4
    way = CHAT | {
        "cache": {
            "block_size": 4, "num_blocks": num_blocks,
            "enable_prefix_caching": enable_prefix_caching,
        },
        "scheduler": {"num_steps_in_flight": num_steps_in_flight, "max_num_batched_tokens": 64},
    }  # fmt: skip
    rival = request("rival", [0, *range(200, 220)], sampling(ignore_eos=True), priority=0)
    reasons = set()
    with open_engine(tiny_llama, way) as small:
        for kind, fields in preempted_kinds(plain).items():
            streamed: list[int] = []

            def listen(token: StreamedToken, told: list[int] = streamed) -> None:
                if token.sample_index == 0 and token.token_id is not None:
                    told.append(token.token_id)

            fields = {"prompt_token_ids": PROMPT, "priority": 1} | fields
            wanted = engine.generate([GenerateRequest(request_id=kind, **fields)])
            target = GenerateRequest(request_id=kind, on_token=listen, **fields)
            # A second turn may come after the rival's end, where the machine is busy.
            for _ in range(10):
                streamed.clear()
                small.take_stats()
                first, *found = small.generate([rival, target])
                if small.take_stats().num_preemptions:
                    break
            else:
                pytest.fail(f"{kind}: nobody was preempted")
            assert first.num_preemptions == 0, kind
            for mine, theirs in zip(found, wanted, strict=True):
                assert_same(mine, theirs)
            replies = [token for reply in found[0].replies for token in reply.token_ids]
            assert streamed == replies + list(found[0].token_ids), kind
            reasons.add(found[0].finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


# The prefix cache: on equals off, whatever has filled it.


@pytest.mark.parametrize(
    ("block_size", "num_tokens"), [(1, 160), (16, 160), (2, 1024)],
    ids=["evicting token by token", "evicting", "roomy"],
)  # fmt: skip
def test_a_warm_cache_changes_no_answer(
    tiny_llama: Path, plain: Completion, block_size: int, num_tokens: int
) -> None:
    shared = [0, *range(100, 132)]
    stop = plain.text[7:10]
    # Rows that end on a stop string, at EOS, at a length and without an answer; then rows that
    # begin as those went on, and rows that were there before.
    warm = [
        request("warm-0", PROMPT, sampling(stop=stop, ignore_eos=True)),
        request("warm-1", [*shared, 5], sampling(logit_bias={EOS: 100}, min_tokens=9)),
        request("warm-2", [*shared, 6], drawn(n=3, ignore_eos=True)),
        request("warm-3", [*shared, 7], sampling(max_tokens=0, prompt_logprobs=0)),
    ]
    targets = [
        request(f"target-{cut}", PROMPT + list(plain.token_ids[:cut]), params)
        for cut in (3, 8, 15)
        for params in [sampling(logprobs=1, ignore_eos=True)]
    ] + [
        request("again", PROMPT, drawn(n=2, logprobs=1, **PENALTIES)),
        request("beside", [*shared, 5, 6], drawn(ignore_eos=True)),
        request("scored", [*shared, 5], sampling(prompt_logprobs=1)),
    ]
    found: dict[bool, list[list[Completion]]] = {}
    for is_on in (True, False):
        way = {
            "cache": {
                "block_size": block_size, "enable_prefix_caching": is_on,
                "num_blocks": num_tokens // block_size,
            },
            "scheduler": {"max_num_batched_tokens": 64},
        }  # fmt: skip
        with open_engine(tiny_llama, way) as llm:
            found[is_on] = [llm.generate(batch) for batch in (warm, targets, warm, targets)]
    for batch_on, batch_off in zip(found[True], found[False], strict=True):
        for mine, theirs in zip(batch_on, batch_off, strict=True):
            assert_same(mine, theirs)
    assert any(c.num_cached_tokens for c in found[True][1])
    assert not any(c.num_cached_tokens for batch in found[False] for c in batch)


# Neighbours: nothing is padded, and the token that others pad with is a token.


def test_short_and_long_prompts_are_answered_in_a_batch_as_alone(
    tiny_llama: Path, engine: OfflineInference
) -> None:
    # The tokenizer pads with EOS, and EOS stands inside of the prompts and at both ends.
    prompts = [[0, EOS, 5], [EOS, *range(60, 98), EOS], [EOS], [0, *range(60, 98), 7], [5, 6, EOS]]
    assert {len(prompt) for prompt in prompts} >= {3, 40}
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    wanted = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MAX_TOKENS,
            do_sample=False, pad_token_id=EOS,
        )  # fmt: skip
        wanted.append(tuple(output[0, len(prompt) :].tolist()))
    params = sampling(logprobs=0)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    together = engine.generate(prompts, params)
    backwards = engine.generate(prompts[::-1], params)[::-1]
    assert [completion.token_ids for completion in alone] == wanted
    for batch in (together, backwards):
        for mine, theirs in zip(batch, alone, strict=True):
            assert_same(mine, theirs)


# Samples: each has a stream of its own, from (seed, id, index).


def test_five_samples_of_a_prompt_are_five_answers(engine: OfflineInference) -> None:
    samples = engine.generate([PROMPT], drawn(n=5))
    assert [sample.sample_index for sample in samples] == list(range(5))
    assert len({sample.token_ids for sample in samples}) == 5
    assert len({sample.token_ids[0] for sample in samples}) > 1, "they part at the first token"


def test_a_sample_does_not_depend_on_how_many_there_are_or_who_runs_beside(
    tiny_llama: Path, engine: OfflineInference
) -> None:
    five = engine.generate([request("row", PROMPT, drawn(n=5))])
    two = engine.generate([request("row", PROMPT, drawn(n=2))])
    way = {"cache": {"enable_prefix_caching": False}, "scheduler": {"max_num_seqs": 2}}
    with open_engine(tiny_llama, way) as other:
        crowd = other.generate(
            [request(f"other-{i}", [5, i], drawn()) for i in range(4)]
            + [request("row", PROMPT, drawn(n=5))]
        )
    assert [c.token_ids for c in two] == [c.token_ids for c in five[:2]]
    assert [c.token_ids for c in crowd[4:]] == [c.token_ids for c in five]


def test_a_row_with_another_id_or_seed_has_other_samples(engine: OfflineInference) -> None:
    asked = [
        request("row", PROMPT, drawn(n=5)),
        request("another", PROMPT, drawn(n=5)),
        request("seeded", PROMPT, drawn(n=5, seed=8), sampling_key=1),
        request("seeded-else", PROMPT, drawn(n=5, seed=9), sampling_key=1),
    ]
    answers = {completion.token_ids for completion in engine.generate(asked)}
    assert len(answers) == 20


def test_samples_without_a_seed_differ_and_those_of_a_greedy_row_do_not(
    engine: OfflineInference,
) -> None:
    unseeded = engine.generate([PROMPT], drawn(n=5, seed=None))
    assert len({completion.token_ids for completion in unseeded}) == 5
    greedy = engine.generate([PROMPT], sampling(n=5))
    assert len({completion.token_ids for completion in greedy}) == 1


# Early ends: min_tokens, several EOS, ignore_eos, stop strings.


@pytest.mark.parametrize("eos", [EOS, SECOND_EOS])
@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens_hold_back_every_eos_to_the_token(
    two_eos: OfflineInference, eos: int, temperature: int
) -> None:
    for min_tokens in (0, 1, 4):
        params = drawn(temperature=temperature, logit_bias={eos: 100}, min_tokens=min_tokens)
        for completion in two_eos.generate([PROMPT, [0], [7] * 40], params):
            assert len(completion.token_ids) == min_tokens + 1
            assert not {EOS, SECOND_EOS} & set(completion.token_ids[:-1])
            assert completion.token_ids[-1] == eos
            assert completion.finish_reason is FinishReason.STOP


def test_min_tokens_hold_back_a_stop_token_of_the_row_too(two_eos: OfflineInference) -> None:
    params = sampling(logit_bias={77: 100}, stop_token_ids=[77], min_tokens=4)
    [completion] = two_eos.generate([PROMPT], params)
    assert (len(completion.token_ids), completion.token_ids[-1]) == (5, 77)
    [ignoring] = two_eos.generate([PROMPT], sampling(**params.given() | {"ignore_eos": True}))
    assert ignoring.token_ids == completion.token_ids


@pytest.mark.parametrize("eos", [EOS, SECOND_EOS])
def test_ignore_eos_beats_every_eos_that_the_model_names(
    two_eos: OfflineInference, eos: int
) -> None:
    params = sampling(logit_bias={eos: 100}, ignore_eos=True, min_tokens=4)
    [completion] = two_eos.generate([PROMPT], params)
    assert completion.token_ids == (eos,) * MAX_TOKENS
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_waits_for_min_tokens_and_the_text_is_cut_where_it_ends_the_row(
    engine: OfflineInference, plain: Completion, ignore_eos: bool
) -> None:
    # What is said first, and said again later: in vain before min_tokens.
    words = [engine.tokenizer.decode([token]) for token in plain.token_ids]
    stop = words[1]
    params = {"stop": stop, "ignore_eos": ignore_eos}
    [early] = engine.generate([PROMPT], sampling(**params))
    assert (early.text, len(early.token_ids)) == (plain.text[: plain.text.index(stop)], 2)
    bias = {plain.token_ids[1]: 100}
    for min_tokens in (0, 1, 2, 7):
        [completion] = engine.generate(
            [PROMPT], sampling(logit_bias=bias, min_tokens=min_tokens, **params)
        )
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.token_ids) == min_tokens + 1
        assert completion.text == stop * min_tokens


def test_min_tokens_as_many_as_max_tokens_leave_no_room_for_a_stop_string(
    engine: OfflineInference, plain: Completion
) -> None:
    params = sampling(stop=plain.text[2:4], min_tokens=MAX_TOKENS, ignore_eos=True)
    [completion] = engine.generate([PROMPT], params)
    assert completion.token_ids == plain.token_ids
    assert (completion.text, completion.finish_reason) == (plain.text, FinishReason.LENGTH)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_stop_string_that_names_a_control_token_ends_the_row_there(
    engine: OfflineInference, skip_special_tokens: bool
) -> None:
    params = sampling(
        stop="<|im_end|>", logit_bias={4: 100}, min_tokens=3,
        skip_special_tokens=skip_special_tokens,
    )  # fmt: skip
    [completion] = engine.generate([PROMPT], params)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] == 4
    assert len(completion.token_ids) == 4
    if skip_special_tokens:
        assert 4 not in completion.token_ids[:-1]
        assert completion.text == engine.tokenizer.decode(completion.token_ids[:-1])
    else:
        assert completion.text == "<|im_end|>" * 3
