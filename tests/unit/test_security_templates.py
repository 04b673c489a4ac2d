"""What a template may not do: reach objects and files, or keep a job from ending."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, run_job, stored_rows
from tiny_model import load_tokenizer, save_tiny_llama

from engine import ChatConfig, ConfigError, GenerateRequest, RequestError, SamplingParams
from flows import time_limit
from flows.config import PromptConfig, SourceConfig
from flows.records import BadRow, RecordReader
from flows.row_indexer import RowIndexer
from flows.time_limit import row_time_limit

ENDLESS = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "_LOOK_SECONDS", 0.02)
    for limit in (time_limit.row_time_limit, time_limit.load_time_limit):
        monkeypatch.setattr(limit, "seconds", 0.1)
        monkeypatch.setattr(limit, "_watch", None)  # one that looks as often


def fault_of(folder: Path, template: str) -> str:
    """Return what becomes of the template's one row."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"text": "a", "mapping": {"a": 1}, "list": [1], "n": 10**9}))
    with RecordReader((SourceConfig(path=path),), PromptConfig(template=template)) as reader:
        (row,) = reader.read_all()
    assert isinstance(row, BadRow), f"it was rendered: {row}"
    return row.error.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ text|attr('__class__') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(text) }}",
        "{{ '{a.__class__}'.format_map({'a': text}) }}",
        "{% set form = '{0.__class__}'.format %}{{ form(text) }}",
        "{{ mapping.update({'b': 2}) }}",
        "{{ list.append(1) }}",
    ],
)
def test_objects_behind_the_values_cannot_be_reached(tmp_path: Path, template: str):
    assert "SecurityError" in fault_of(tmp_path, template)


@pytest.mark.parametrize("statement", ["include '/etc/passwd'", "import 'os' as os"])
def test_files_cannot_be_read(tmp_path: Path, statement: str):
    assert "no loader for this environment" in fault_of(tmp_path, f"{{% {statement} %}}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ range(n)|list }}",
        "{{ text * n }}",
        "{{ n * text }}",
        "{{ list * n }}",
        "{{ n ** n }}",
        "{{ 10 ** 10 ** n }}",
    ],
)
def test_a_number_of_the_data_makes_nothing_huge(tmp_path: Path, template: str):
    assert "OverflowError" in fault_of(tmp_path, template)


def test_arithmetic_of_a_sensible_size_works(tmp_path: Path):
    template = "{{ text * 3 }}{{ 2 * text }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 3 * 4 }}{{ 1.5 * 2 }}"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    prompt = PromptConfig(template=template, format="text")
    with RecordReader((SourceConfig(path=path),), prompt) as reader:
        (row,) = reader.read_all()
    assert not isinstance(row, BadRow)
    assert row.prompt == "aaaaa10240.5123.0"


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ " + "+".join("1" * 5000) + " }}"],
)
def test_a_template_that_cannot_be_compiled_is_told_before_any_row(tmp_path: Path, template: str):
    with pytest.raises(ConfigError, match=r"prompt\.template: cannot be compiled"):
        fault_of(tmp_path, template)


@pytest.mark.parametrize("template", ENDLESS)
@pytest.mark.usefixtures("short_limit")
def test_a_row_whose_template_does_not_end_is_an_error_row_and_the_job_goes_on(
    tmp_path: Path, template: str
):
    rows: list[dict[str, Any]] = [
        {"id": "endless", "is_endless": True},
        {"id": "other", "is_endless": False},
    ]
    guarded = f"{{% if is_endless %}}{template}{{% else %}}hello{{% endif %}}"
    config = make_job(tmp_path, rows, prompt={"template": guarded})
    run_job(config)
    by_id = {row.row_id: row for row in stored_rows(config)}
    assert by_id["endless"].error_code == "bad_template"
    assert "more than 0.1 s of computing" in str(by_id["endless"].error_message)
    assert by_id["other"].error_code is None


@pytest.mark.usefixtures("short_limit")
def test_a_chat_template_that_does_not_end_is_that_rows_error(tmp_path: Path):
    """It comes with the model, so it may be anybody's; transformers has a sandbox of its own."""
    folder = save_tiny_llama(tmp_path / "model")
    guarded = "{% if messages[0].content == 'endless' %}" + ENDLESS[0] + "{% endif %}ok"
    tokenizer = load_tokenizer(folder, chat=ChatConfig(chat_template=guarded))

    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        with row_time_limit:
            return tokenizer.encode_request(GenerateRequest(request_id="a", messages=messages))

    with pytest.raises(RequestError, match="of computing"):
        encode("endless")
    assert encode("hello")


def test_a_chat_template_reaches_no_objects(tmp_path: Path):
    folder = save_tiny_llama(tmp_path / "model")
    escape = "{{ messages.__class__.__mro__ }}{{ '{0.__class__}'.format(messages) }}"
    tokenizer = load_tokenizer(folder, chat=ChatConfig(chat_template=escape))
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.encode_request(GenerateRequest(request_id="a", messages=messages))


@pytest.mark.usefixtures("short_limit")
def test_planning_gives_the_tokens_of_a_row_no_more_time_either(tmp_path: Path):
    class Endless:
        def encode_request(self, request: GenerateRequest) -> list[int]:
            while request.prompt == "endless":
                pass
            return [1]

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "endless"}\n{"prompt": "other"}\n')
    with RecordReader((SourceConfig(path=path),), PromptConfig(format="text")) as reader:
        indexer = RowIndexer(
            reader,
            Endless(),
            SamplingParams(),
            max_model_len=4096,
            too_long="error",
            deduplicate=True,
        )
        endless, other = (indexer.index(row) for row in reader.read_all())
    assert (endless.error_code, other.error_code) == ("bad_template", None)
    assert "line 1: its template took more than" in str(endless.error_message)


@pytest.mark.usefixtures("short_limit")
def test_a_chat_template_that_does_not_end_when_it_is_tried_is_told_before_any_row(tmp_path: Path):
    folder = save_tiny_llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(ENDLESS[0])
    config = make_job(tmp_path, [{"prompt": "hello"}], engine__device="cpu")
    engine = config.engine.model_copy(update={"model_path": str(folder)})
    with pytest.raises(ConfigError, match=r"took more than.*or set engine\.chat\.chat_template"):
        run_job(config.model_copy(update={"engine": engine}))


def test_a_block_that_ends_in_time_leaves_nothing_behind(short_limit: None):
    with row_time_limit:
        time.sleep(0.3)  # a host that is busy with others costs a row nothing
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    with pytest.raises(ZeroDivisionError), row_time_limit:
        1 / 0  # noqa: B018
    assert row_time_limit._ends == {}


def test_a_block_may_compute_until_its_time_is_up(
    short_limit: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_time_limit, "seconds", 30.0)
    end = time.thread_time() + 0.2
    with row_time_limit:
        while time.thread_time() < end:
            pass
