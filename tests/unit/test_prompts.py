"""PromptBuilder: templates and the chat form, seen through the reader that uses it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, RequestErrorCode
from flows.config import PromptConfig, SourceConfig
from flows.records import RecordReader


def ask(folder: Path, row: dict[str, Any], **prompt: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    with RecordReader((SourceConfig(path=path),), PromptConfig(**prompt)) as reader:
        (found,) = reader.read_all()
    return found


def test_a_prompt_string_becomes_a_user_message_by_default(tmp_path: Path) -> None:
    record = ask(tmp_path, {"prompt": "hi"})
    assert (record.prompt, record.messages) == (None, [{"role": "user", "content": "hi"}])


def test_format_text_continues_the_string_as_it_stands(tmp_path: Path) -> None:
    record = ask(tmp_path, {"prompt": " hi\n"}, format="text")
    assert (record.prompt, record.messages) == (" hi\n", None)


def test_a_template_is_the_prompt_whatever_else_the_row_holds(tmp_path: Path) -> None:
    row = {"prompt": "old", "messages": "old", "text": "new\n", "n": 2}
    record = ask(tmp_path, row, template="{{ text }}{{ n + 1 }}", format="text")
    assert record.prompt == "new\n3"
    assert record.columns == row


def test_the_newline_that_yaml_puts_at_the_end_of_a_template_is_dropped(tmp_path: Path) -> None:
    assert ask(tmp_path, {"a": "x\n"}, template="{{ a }}\n", format="text").prompt == "x\n"


def test_a_system_template_comes_before_prompt_and_messages(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer in fr."}
    template = "Answer in {{ lang }}."
    user = {"role": "user", "content": "hi"}
    for row in ({"prompt": "hi"}, {"messages": [user]}):
        record = ask(tmp_path, row | {"lang": "fr"}, system=template)
        assert record.messages == [system, user]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_with_a_system_message_of_their_own_keep_it(tmp_path: Path, role: str) -> None:
    messages = [{"role": role, "content": "own"}, {"role": "user", "content": "hi"}]
    record = ask(tmp_path, {"messages": messages}, system="{{ missing }}")
    assert record.messages == messages


def test_token_ids_are_left_alone(tmp_path: Path) -> None:
    record = ask(tmp_path, {"prompt_token_ids": [1, 2]}, system="Be brief.")
    assert (record.prompt_token_ids, record.messages) == ([1, 2], None)


def test_an_undefined_variable_is_named_with_the_columns_there_are(tmp_path: Path) -> None:
    bad = ask(tmp_path, {"text": "a", "lang": "b"}, template="{{ txet }}")
    assert bad.error.code is RequestErrorCode.BAD_TEMPLATE
    assert "prompt.template: 'txet' is undefined" in bad.error.message
    assert "'text', 'lang'" in bad.error.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // n }}",
        "{{ text + 1 }}",
        "{{ text.a.b }}",
        "{{ range(10**9) }}",
        "{{ text.__class__.__mro__ }}",
        "{{ items.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_on_a_row_costs_that_row_alone(tmp_path: Path, template: str) -> None:
    row = {"text": "a", "n": 0, "items": [1]}
    bad = ask(tmp_path, row, template=template)
    assert bad.error.code is RequestErrorCode.BAD_TEMPLATE
    assert bad.columns == row


@pytest.mark.parametrize("name", ["template", "system"])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a\n{{ b", "line 2"),
        ("{% for x in y %}", "endfor"),
        ("{{ x|nosuchfilter }}", "nosuchfilter"),
        ("{{ [1, 2]|random }}", "random"),
    ],
)
def test_a_template_that_does_not_compile_stops_before_reading(
    tmp_path: Path, name: str, source: str, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=rf"prompt\.{name}, .*{wanted}"):
        ask(tmp_path, {"prompt": "a"}, **{name: source})


def test_a_system_message_that_could_never_be_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt\.system is set and prompt\.format is text"):
        ask(tmp_path, {"prompt": "a"}, system="Be brief.", format="text")
