"""Prompts to ids and ids to text, with two kinds of real tokenizers trained on the spot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ChatConfig, EngineConfig
from engine.detokenizer import IncrementalDecoder
from engine.errors import ConfigError, RequestError, RequestErrorCode
from engine.model_source import ModelSource
from engine.request import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import EncodedPrompt, MockTokenizer, PretrainedTokenizer, Tokenizer

KINDS = ["byte_level", "sentencepiece"]
_TRAIN = {
    "byte_level": tiny_model.train_byte_level_bpe,
    "sentencepiece": tiny_model.train_sentencepiece_bpe,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        _TRAIN[kind]().save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, PretrainedTokenizer]:
    return {kind: tiny_model.load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tokenizers: dict[str, PretrainedTokenizer]
) -> PretrainedTokenizer:
    return tokenizers[request.param]


def encode(tokenizer: Tokenizer, **prompt: Any) -> list[int]:
    return tokenizer.encode_request(GenerateRequest(request_id="0", **prompt))


def decode_step_by_step(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join(decoder.push(token) for token in token_ids) + decoder.finish()


# Text to ids.


def test_a_text_is_encoded_with_exactly_one_bos(tokenizer: PretrainedTokenizer) -> None:
    ids = encode(tokenizer, prompt="def add(left, right):")
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "def add(left, right):"


def test_a_text_that_brings_its_bos_gets_no_second_one(tokenizer: PretrainedTokenizer) -> None:
    rendered = f"{tiny_model.BOS}{tiny_model.IM_START}user\nHello{tiny_model.IM_END}"
    ids = encode(tokenizer, prompt=rendered)
    assert ids.count(0) == 1
    assert ids[:2] == [0, 3]


def test_a_chat_has_the_bos_and_the_control_tokens_of_its_template_only(
    tokenizer: PretrainedTokenizer,
) -> None:
    ids = encode(tokenizer, messages=[{"role": "user", "content": "the quick fox"}])
    assert ids[:2] == [0, 3]
    assert [ids.count(token) for token in (0, 1, 3, 4)] == [1, 0, 2, 1]
    assert tokenizer.decode(ids).endswith("assistant\n")


@pytest.mark.parametrize("hostile", tiny_model.SPECIAL_TOKENS)
def test_a_special_token_inside_of_a_message_stays_text(
    tokenizer: PretrainedTokenizer, hostile: str
) -> None:
    plain = encode(tokenizer, messages=[{"role": "user", "content": "AB"}])
    ids = encode(tokenizer, messages=[{"role": "user", "content": f"A{hostile}B"}])
    special = range(len(tiny_model.SPECIAL_TOKENS))
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    assert f"A{hostile}B" in tokenizer.decode(ids)


def test_the_options_of_the_chat_template_reach_it(folders: dict[str, Path]) -> None:
    chat = ChatConfig(
        chat_template="{% if loud %}LOUD {% endif %}{{ messages[0].content }}",
        chat_template_kwargs={"loud": True},
    )
    loud = tiny_model.load_tokenizer(folders["byte_level"], chat=chat)
    assert loud.decode(encode(loud, messages=[{"role": "user", "content": "cat"}])) == "LOUD cat"


def test_a_chat_template_may_be_a_file(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("<<{{ messages[0].content }}>>")
    mine = tiny_model.load_tokenizer(
        folders["byte_level"], chat=ChatConfig(chat_template=str(path))
    )
    assert mine.decode(encode(mine, messages=[{"role": "user", "content": "cat"}])) == "<<cat>>"


def test_a_chat_template_that_is_neither_text_nor_file_is_named(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.chat\.chat_template: 'no/such\.jinja'"):
        tiny_model.load_tokenizer(
            folders["byte_level"], chat=ChatConfig(chat_template="no/such.jinja")
        )


def test_messages_that_the_template_refuses_are_an_error_of_the_row(
    folders: dict[str, Path],
) -> None:
    chat = ChatConfig(chat_template="{{ raise_exception('roles must alternate') }}")
    strict = tiny_model.load_tokenizer(folders["byte_level"], chat=chat)
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        encode(strict, messages=[{"role": "user", "content": "cat"}])
    assert caught.value.code is RequestErrorCode.BAD_TEMPLATE


def test_messages_without_any_template_are_an_error_of_the_row(tmp_path: Path) -> None:
    plain = tiny_model.train_byte_level_bpe()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="no chat template") as caught:
        encode(tiny_model.load_tokenizer(tmp_path), messages=[{"role": "user", "content": "x"}])
    assert caught.value.code is RequestErrorCode.BAD_ROW


def test_a_lone_surrogate_is_replaced_and_crashes_nothing(tokenizer: PretrainedTokenizer) -> None:
    message = {"role": "user", "content": "the \ud800 cat"}
    for ids in (encode(tokenizer, prompt="the \ud800 cat"), encode(tokenizer, messages=[message])):
        assert "the \ufffd" in tokenizer.decode(ids)


# Token ids as they are.


@pytest.mark.parametrize(
    "token_ids",
    [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], np.int32), torch.tensor([5, 6, 7])],
    ids=["list", "tuple", "numpy", "tensor"],
)
def test_token_ids_come_in_any_sequence_and_are_taken_as_they_are(
    tokenizer: PretrainedTokenizer, token_ids: Sequence[int]
) -> None:
    ids = encode(tokenizer, prompt_token_ids=token_ids)
    assert ids == [5, 6, 7]
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize(
    ("token_ids", "code", "message"),
    [
        ([], RequestErrorCode.PROMPT_EMPTY, "no token"),
        ([5, 400], RequestErrorCode.TOKEN_OUT_OF_VOCABULARY, "holds token 400; .* 0 to 399"),
        ([-1, 5], RequestErrorCode.TOKEN_OUT_OF_VOCABULARY, "holds token -1"),
        ([2**70], RequestErrorCode.TOKEN_OUT_OF_VOCABULARY, str(2**70)),
        ([5, 1.5], RequestErrorCode.BAD_ROW, "something else: 'float'"),
        (["5"], RequestErrorCode.BAD_ROW, "something else: 'str'"),
        (torch.tensor([1.0]), RequestErrorCode.BAD_ROW, "something else"),
        (np.ones((2, 2), np.int64), RequestErrorCode.BAD_ROW, "something else"),
    ],
)
def test_token_ids_that_make_no_sense_are_an_error_of_the_row(
    tokenizer: PretrainedTokenizer, token_ids: Any, code: RequestErrorCode, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        encode(tokenizer, prompt_token_ids=token_ids)
    assert caught.value.code is code


def test_a_tokenizer_with_more_tokens_than_the_model_makes_an_error_of_the_row(
    folders: dict[str, Path],
) -> None:
    narrow = tiny_model.load_tokenizer(folders["byte_level"], vocab_size=200)
    assert encode(narrow, prompt="a") == [0, 69]
    with pytest.raises(RequestError, match="prompt holds token 365; .* 0 to 199") as caught:
        encode(narrow, prompt="the quick fox")
    assert caught.value.code is RequestErrorCode.TOKEN_OUT_OF_VOCABULARY


@pytest.mark.parametrize(
    ("prompt", "found"),
    [({}, "no prompt"), ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids")],
)
def test_a_request_has_exactly_one_kind_of_prompt(prompt: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError, match=f"found {found}; wanted exactly one"):
        encode(MockTokenizer(vocab_size=512, chat=ChatConfig()), **prompt)


# Ids to text.

TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "naïve café und größe Straße",
    "你好,世界。 🙂🙂 a🙂b",
    "  two spaces  before and after  ",
    "\ufffd stands alone \ufffd",
    "a\u0301 combining, \u200d joiner, \U0001f468\u200d\U0001f469\u200d\U0001f467 family",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_piece_by_piece_as_it_was(
    tokenizer: PretrainedTokenizer, text: str
) -> None:
    ids = encode(tokenizer, prompt=text)
    assert tokenizer.decode(ids) == text
    assert decode_step_by_step(tokenizer, ids) == text


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
@pytest.mark.parametrize("kind", KINDS)
def test_incremental_decoding_of_any_text_equals_decoding_it_whole(
    tokenizers: dict[str, PretrainedTokenizer], kind: str, text: str
) -> None:
    ids = encode(tokenizers[kind], prompt=text)
    assert decode_step_by_step(tokenizers[kind], ids) == tokenizers[kind].decode(ids)


@settings(deadline=None, max_examples=150)
@given(token_ids=st.lists(st.integers(0, 360), max_size=20))
def test_incremental_decoding_of_any_tokens_equals_decoding_them_whole(
    tokenizers: dict[str, PretrainedTokenizer], token_ids: list[int]
) -> None:
    # Byte fallback is left out: there, one wrong byte changes how the bytes before it decode.
    tokenizer = tokenizers["byte_level"]
    assert decode_step_by_step(tokenizer, token_ids) == tokenizer.decode(token_ids)


def test_special_tokens_in_the_middle_of_an_answer_take_no_space_away(
    tokenizer: PretrainedTokenizer,
) -> None:
    words = [encode(tokenizer, prompt=text)[1:] for text in ("the fox", " dog", " cat")]
    ids = [0, 1, *words[0], 1, 4, *words[1], 1, *words[2], 1]
    assert decode_step_by_step(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).split() == ["the", "fox", "dog", "cat"]


def test_no_piece_ever_holds_half_a_character(tokenizer: PretrainedTokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token) for token in encode(tokenizer, prompt="ü🙂é 世界 ß")]
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # some token did end in half a character


def test_a_tail_of_half_a_character_comes_out_at_the_end(tokenizer: PretrainedTokenizer) -> None:
    ids = encode(tokenizer, prompt="ab\U0001f980")[:-1]
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push(token) for token in ids) == "ab"
    assert set(decoder.finish()) == {"\ufffd"}


# The folder.


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no usable tokenizer .*set engine\.tokenizer_path"):
        tiny_model.load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.tokenizer_path: found no folder .*nowhere"):
        tiny_model.load_tokenizer(tmp_path / "nowhere")


def test_the_fingerprint_tells_tokenizers_templates_and_options_apart(
    folders: dict[str, Path],
) -> None:
    def fingerprint(kind: str = "byte_level", **chat: Any) -> dict[str, str]:
        return tiny_model.load_tokenizer(folders[kind], chat=ChatConfig(**chat)).fingerprint()

    base = fingerprint()
    assert fingerprint() == base
    changed = {
        "tokenizer": fingerprint("sentencepiece"),
        "chat_template": fingerprint(chat_template="{{ messages }}"),
        "chat_options": fingerprint(chat_template_kwargs={"enable_thinking": False}),
    }
    for name, other in changed.items():
        assert {key for key in base if base[key] != other[key]} == {name}
    assert fingerprint(tools=[{"name": "f"}])["chat_options"] != base["chat_options"]


# Truncation.

CHAT = [
    {"role": "user", "content": "the quick brown fox jumps over the lazy dog"},
    {"role": "assistant", "content": "the quick cat"},
    {"role": "user", "content": "and the lazy dog"},
]


def truncated(tokenizer: Tokenizer, limit: int, **prompt: Any) -> EncodedPrompt:
    params = SamplingParams(truncate_prompt_tokens=limit)
    return tokenizer.encode(GenerateRequest(request_id="0", sampling_params=params, **prompt))


def test_a_long_text_keeps_its_bos_and_its_end(tokenizer: PretrainedTokenizer) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    whole = encode(tokenizer, prompt=text)
    cut = truncated(tokenizer, 5, prompt=text)
    assert cut == EncodedPrompt(token_ids=[0, *whole[-4:]], is_truncated=True)
    assert truncated(tokenizer, len(whole), prompt=text) == EncodedPrompt(token_ids=whole)
    ready = truncated(tokenizer, 3, prompt_token_ids=[7, 8, 9, 10])
    assert ready == EncodedPrompt(token_ids=[8, 9, 10], is_truncated=True)


def test_a_chat_is_cut_at_every_length_but_never_in_its_generation_prompt(
    tokenizer: PretrainedTokenizer,
) -> None:
    whole = encode(tokenizer, messages=CHAT)
    opening = "<|im_start|>assistant\n"
    num_fixed = len(tokenizer._encode_bare(opening))
    for limit in range(1, len(whole)):
        if limit < num_fixed + 1:
            with pytest.raises(RequestError, match="truncate_prompt_tokens") as caught:
                truncated(tokenizer, limit, messages=CHAT)
            assert caught.value.code is RequestErrorCode.INVALID_SAMPLING_PARAMS
            continue
        cut = truncated(tokenizer, limit, messages=CHAT)
        assert cut.is_truncated
        assert cut.token_ids == [0, *whole[len(whole) - limit + 1 :]]
        text = tokenizer.decode(cut.token_ids, skip_special_tokens=False)
        assert text.replace(" ", "").endswith(opening)


# Bad words.


def test_a_bad_word_is_spelt_as_the_tokenizer_spells_it_at_the_start_and_inside(
    tokenizers: dict[str, PretrainedTokenizer],
) -> None:
    bpe = tokenizers["byte_level"]
    spellings = bpe.bad_words_token_ids(("lazy", " the"))
    texts = [bpe.decode(list(spelling)) for spelling in spellings]
    assert "lazy" in texts
    assert {"the", " the"} <= set(texts)
    assert all(0 not in spelling for spelling in spellings)


def test_sampling_that_names_what_the_model_has_not_is_refused_with_the_prompt(
    tokenizer: PretrainedTokenizer,
) -> None:
    for name, value in (("stop_token_ids", (10**6,)), ("logit_bias", {10**6: 1.0})):
        params = SamplingParams.model_validate({name: value})
        request = GenerateRequest(request_id="0", prompt="the", sampling_params=params)
        with pytest.raises(RequestError, match=f"{name} names token 1000000"):
            tokenizer.encode_request(request)


# Special tokens.


def test_special_tokens_are_left_in_the_text_where_that_is_asked_for(
    tokenizer: PretrainedTokenizer,
) -> None:
    ids = [0, *tokenizer._encode_bare("the dog"), 4, *tokenizer._encode_bare("the cat"), 1]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<s>")
    assert text.endswith("</s>")
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    assert "".join(decoder.push(token) for token in ids) + decoder.finish() == text


def test_the_texts_of_single_tokens_make_up_the_text(tokenizer: PretrainedTokenizer) -> None:
    text = "cat\nthe quick brown fox, the dog"
    token_ids = encode(tokenizer, prompt=text)[1:]  # without the BOS
    # SentencePiece begins a text with a space.
    assert "".join(map(tokenizer.token_text, token_ids)).removeprefix(" ") == text


def test_a_special_token_and_half_a_character_have_a_text(tokenizer: PretrainedTokenizer) -> None:
    assert tokenizer.token_text(1) == tiny_model.EOS
    halves = [tokenizer.token_text(token) for token in encode(tokenizer, prompt="\u0bb8")[-3:]]
    assert halves == ["\ufffd"] * 3


def test_the_mock_tokenizer_has_one_token_for_each_byte() -> None:
    config = EngineConfig(model_path="none", device="mock")
    mock = Tokenizer.load(config, ModelSource.inspect(config))
    ids = encode(mock, prompt="aß")
    assert len(ids) == 3
    assert mock.decode([*ids, 2]) == "aß"
    assert decode_step_by_step(mock, ids) == "aß"
