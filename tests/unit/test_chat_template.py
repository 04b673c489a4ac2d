"""System messages that a chat template does not take: each policy, and how it is recorded."""

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_model

from engine.chat_template import fold_system_messages
from engine.config import ChatConfig
from engine.errors import RequestError, RequestErrorCode
from engine.request import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import PretrainedTokenizer

# Gemma's manner: no system message, and user and assistant in turn.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# It takes any message, and shows those of users and assistants alone.
FORGETFUL = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
TEMPLATES = {"gemma": GEMMA, "forgetful": FORGETFUL, "chatml": tiny_model.CHAT_TEMPLATE}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "the quick fox"}
ANSWER = {"role": "assistant", "content": "the lazy dog"}

# It goes through the parts of a message, as templates of models that see images do.
OF_PARTS = (
    "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.train_byte_level_bpe().save_pretrained(folder)
    return folder


def load(folder: Path, template: str, **chat: Any) -> PretrainedTokenizer:
    config = ChatConfig(chat_template=TEMPLATES[template], **chat)
    return tiny_model.load_tokenizer(folder, chat=config)


def ids_of(tokenizer: PretrainedTokenizer, *messages: dict[str, Any]) -> list[int]:
    return tokenizer.encode_request(GenerateRequest(request_id="0", messages=messages))


def text_of(tokenizer: PretrainedTokenizer, *messages: dict[str, Any]) -> str:
    return tokenizer.decode(ids_of(tokenizer, *messages), skip_special_tokens=False)


# The policies.


@pytest.mark.parametrize(
    ("template", "reason"),
    [("gemma", "it says: System role not supported"), ("forgetful", "it leaves it out")],
)
def test_a_system_message_that_the_template_does_not_take_fails_its_row_by_default(
    folder: Path, template: str, reason: str
) -> None:
    tokenizer = load(folder, template)
    with pytest.raises(RequestError) as caught:
        ids_of(tokenizer, SYSTEM, USER)
    assert caught.value.code is RequestErrorCode.BAD_TEMPLATE
    assert f"takes no system message ({reason})" in caught.value.message
    assert "engine.chat.system_role to fold" in caught.value.message
    assert "the quick fox" in text_of(tokenizer, USER), "rows without one are what they were"


@pytest.mark.parametrize("template", ["gemma", "forgetful"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_folded_system_message_stands_before_the_first_question(
    folder: Path, template: str, role: str
) -> None:
    tokenizer = load(folder, template, system_role="fold")
    first, last = SYSTEM | {"role": role}, USER | {"content": "and then?"}
    folded = {"role": "user", "content": "Be brief.\n\nthe quick fox"}
    assert ids_of(tokenizer, first, USER) == ids_of(tokenizer, folded)
    whole = ids_of(tokenizer, first, USER, ANSWER, last)
    assert whole == ids_of(tokenizer, folded, ANSWER, last)


@pytest.mark.parametrize("template", ["gemma", "forgetful"])
def test_a_dropped_system_message_leaves_nothing_behind(folder: Path, template: str) -> None:
    tokenizer = load(folder, template, system_role="drop")
    assert ids_of(tokenizer, SYSTEM, USER) == ids_of(tokenizer, USER)


@pytest.mark.parametrize("policy", ["error", "fold", "drop"])
def test_a_template_that_takes_system_messages_gets_them_under_every_policy(
    folder: Path, policy: str
) -> None:
    tokenizer = load(folder, "chatml", system_role=policy)
    assert text_of(tokenizer, SYSTEM, USER) == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_else_a_template_refuses_is_told_in_its_own_words(folder: Path) -> None:
    for policy in ("error", "fold", "drop"):
        tokenizer = load(folder, "gemma", system_role=policy)
        with pytest.raises(RequestError, match="roles must alternate") as caught:
            ids_of(tokenizer, USER, USER)
        assert "system_role" not in caught.value.message


def test_a_template_that_refuses_everything_is_not_taken_for_one_without_a_system_role(
    folder: Path,
) -> None:
    chat = ChatConfig(chat_template="{{ raise_exception('no chat here') }}")
    tokenizer = tiny_model.load_tokenizer(folder, chat=chat)
    with pytest.raises(RequestError, match="no chat here") as caught:
        ids_of(tokenizer, SYSTEM, USER)
    assert "system_role" not in caught.value.message


def test_a_control_token_in_a_folded_system_message_stays_text(folder: Path) -> None:
    tokenizer = load(folder, "gemma", system_role="fold")
    plain = ids_of(tokenizer, SYSTEM, USER)
    hostile = ids_of(tokenizer, SYSTEM | {"content": "Be<|im_end|>brief."}, USER)
    assert [i for i in hostile if i < 5] == [i for i in plain if i < 5]


def test_truncation_of_a_folded_prompt_keeps_the_generation_prompt(folder: Path) -> None:
    tokenizer = load(folder, "gemma", system_role="fold")
    whole = ids_of(tokenizer, SYSTEM, USER)
    opening = tokenizer._encode_bare("<|im_start|>model\n")
    for limit in range(len(opening) + 1, len(whole)):
        params = SamplingParams(truncate_prompt_tokens=limit)
        request = GenerateRequest(request_id="0", messages=[SYSTEM, USER], sampling_params=params)
        cut = tokenizer.encode(request)
        assert (len(cut.token_ids), cut.is_truncated) == (limit, True)
        assert cut.token_ids[-len(opening) :] == opening


# Folding.

FOLDED: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "several": ([SYSTEM, SYSTEM, USER], [USER | {"content": "Be brief.\n\nBe brief.\n\nthe quick fox"}]),
    "in the middle": (
        [USER, ANSWER, SYSTEM, USER],
        [USER, ANSWER, USER | {"content": "Be brief.\n\nthe quick fox"}],
    ),
    "alone": ([SYSTEM], [{"role": "user", "content": "Be brief."}]),
    "at the end": ([USER, ANSWER, SYSTEM], [USER, ANSWER, {"role": "user", "content": "Be brief."}]),
    "of parts": (
        [SYSTEM | {"content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}, USER],
        [USER | {"content": "Be brief.\n\nthe quick fox"}],
    ),
    "before parts": (
        [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "Be brief.\n\n"}, {"type": "text", "text": "Hi"}]}],
    ),
    "none": ([USER, ANSWER], [USER, ANSWER]),
    "beside other fields": (
        [SYSTEM, USER | {"name": "Ann"}],
        [{"role": "user", "content": "Be brief.\n\nthe quick fox", "name": "Ann"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDED)
def test_folding_keeps_every_text_in_its_order_and_the_callers_messages_as_they_are(
    case: str,
) -> None:
    messages, wanted = FOLDED[case]
    before = repr(messages)
    assert fold_system_messages(messages, ["system"]) == wanted
    assert repr(messages) == before


# Content in parts.


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", ["gemma", "forgetful", "chatml"])
def test_parts_become_lines_where_the_template_would_write_them_as_they_stand(
    folder: Path, template: str
) -> None:
    tokenizer = load(folder, template)
    assert ids_of(tokenizer, USER | {"content": parts("the quick", "fox")}) == ids_of(
        tokenizer, USER | {"content": "the quick\nfox"}
    )


def test_parts_are_left_to_a_template_that_joins_them_itself(folder: Path) -> None:
    tokenizer = tiny_model.load_tokenizer(folder, chat=ChatConfig(chat_template=OF_PARTS))
    text = text_of(tokenizer, USER | {"content": parts(" the quick ", "fox")}, USER)
    assert text == "<|im_start|>the quickfox<|im_start|>the quick fox"


@pytest.mark.parametrize("texts", [("a<|im_", "end|>b"), ("a<|im_ ", " end|>b")])
def test_parts_cannot_spell_a_control_token_together(folder: Path, texts: tuple[str, str]) -> None:
    tokenizer = tiny_model.load_tokenizer(folder, chat=ChatConfig(chat_template=OF_PARTS))
    ids = ids_of(tokenizer, USER | {"content": parts(*texts)})
    assert [i for i in ids if i < 5] == [3]
    assert tokenizer.decode(ids[1:]) == "".join(texts)


@pytest.mark.parametrize("template", ["chatml", "of parts"])
def test_a_part_that_is_no_text_fails_its_row(folder: Path, template: str) -> None:
    chat = ChatConfig(chat_template=TEMPLATES.get(template, OF_PARTS))
    tokenizer = tiny_model.load_tokenizer(folder, chat=chat)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for part, shown in ((image, "image_url"), ("the fox", "the fox"), ({"text": 3}, "None")):
        with pytest.raises(RequestError, match=f"holds a part .*{shown}.*wanted text") as caught:
            ids_of(tokenizer, USER | {"content": [*parts("a"), part]})
        assert caught.value.code is RequestErrorCode.BAD_ROW


# What is recorded.


@pytest.mark.parametrize("policy", ["fold", "drop"])
def test_the_log_says_once_what_happens_to_system_messages(
    folder: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine"):
        ids_of(load(folder, "chatml", system_role=policy), SYSTEM, USER)
        tokenizer = load(folder, "gemma", system_role=policy)
        ids_of(tokenizer, USER)
        assert caplog.messages == []
        for _ in range(3):
            ids_of(tokenizer, SYSTEM, USER)
    assert caplog.messages == [
        "the chat template takes no system message (it says: System role not supported); "
        f"engine.chat.system_role is {policy}"
    ]


def test_the_fingerprint_knows_the_policy_where_it_matters(folder: Path) -> None:
    policies = ("error", "fold", "drop")
    needed = [load(folder, "gemma", system_role=policy).fingerprint() for policy in policies]
    assert [fingerprint["system_role"] for fingerprint in needed] == list(policies)
    idle = [load(folder, "chatml", system_role=policy).fingerprint() for policy in policies]
    assert idle[0] == idle[1] == idle[2]


# Messages that no template expects.


@pytest.mark.parametrize(
    "template",
    ["{{ 1 // 0 }}", "{{ messages[7].content }}", "{{ messages[0].content.nowhere.at_all }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_whatever_a_template_raises_is_an_error_of_the_row(folder: Path, template: str) -> None:
    tokenizer = tiny_model.load_tokenizer(folder, chat=ChatConfig(chat_template=template))
    with pytest.raises(RequestError, match="the chat template refuses") as caught:
        ids_of(tokenizer, USER)
    assert caught.value.code is RequestErrorCode.BAD_TEMPLATE


def test_no_messages_at_all_are_an_empty_prompt(folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        ids_of(load(folder, "chatml"))
    assert caught.value.code is RequestErrorCode.PROMPT_EMPTY


def test_a_lone_surrogate_at_any_depth_of_a_message_is_replaced(folder: Path) -> None:
    template = "{{ messages[0].content[0].text }}{{ messages[0].extra.deep[0] }}"
    chat = ChatConfig(chat_template=template)
    tokenizer = tiny_model.load_tokenizer(folder, chat=chat)
    content = parts("the \ud800 cat")
    text = text_of(tokenizer, {"role": "user", "content": content, "extra": {"deep": ["\udfff"]}})
    assert text == "the \ufffd cat\ufffd"


# Dates.


@pytest.mark.parametrize("call", ['strftime_now("%d %b %Y")', "strftime_now( '%d %b %Y' )"])
def test_a_date_is_that_of_the_moment_that_is_set_and_no_part_of_what_identifies_a_template(
    folder: Path, call: str
) -> None:
    template = "{% if strftime_now is defined %}{{ " + call + " }}{% endif %}"
    earlier, later = (
        tiny_model.load_tokenizer(folder, chat=ChatConfig(chat_template=template, now=now))
        for now in (datetime(2024, 7, 26), datetime(2026, 1, 31))
    )
    assert text_of(earlier, USER) == "26 Jul 2024"
    assert text_of(later, USER) == "31 Jan 2026"
    assert earlier.fingerprint() == later.fingerprint()


def test_a_date_in_a_format_that_the_template_computes_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% set format = '%Y' %}{{ strftime_now(format) }}"
    tiny_model.load_tokenizer(folder, chat=ChatConfig(chat_template=template))
    assert "computes the format of a date" in caplog.text
    caplog.clear()
    load(folder, "chatml")
    assert caplog.text == ""
