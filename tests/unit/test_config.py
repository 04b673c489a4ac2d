"""JobConfig: what a user writes, overrides on the command line, and what a wrong key is told."""

from pathlib import Path

import pytest
import yaml
from job_builders import job_mapping, questions, write_job

from engine import ConfigError
from flows.config import JobConfig
from flows.job_file import load_job_config, validate_job_config
from flows.ledger_url import default_ledger_url
from flows.preparation import job_dir_of, output_path_of, resolve, resume_command


def load(folder: Path, *overrides: str) -> JobConfig:
    return load_job_config(write_job(folder, questions(1)), overrides)


def complaint(folder: Path, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_job_config(job_mapping(folder, **changes), origin="job.yaml")
    return str(caught.value)


class TestOverrides:
    def test_an_override_replaces_a_value_deep_in_the_file(self, tmp_path: Path) -> None:
        config = load(tmp_path, "engine.scheduler.max_num_seqs=3", "shards=5")
        assert (config.engine.scheduler.max_num_seqs, config.shards) == (3, 5)
        assert config.sampling.max_tokens == 8  # what was not named stays

    def test_an_override_makes_a_section_that_the_file_lacks(self, tmp_path: Path) -> None:
        assert load(tmp_path, "prompt.system=Be brief").prompt.system == "Be brief"

    def test_an_item_of_a_list_is_named_by_its_number(self, tmp_path: Path) -> None:
        assert load(tmp_path, "sources.0.limit=2").sources[0].limit == 2

    def test_values_are_read_as_yaml(self, tmp_path: Path) -> None:
        config = load(tmp_path, "engine.device_ids=[0, 1]", "stream_output=true", "seed=")
        assert (config.engine.device_ids, config.stream_output, config.seed) == (
            (0, 1), True, None,
        )  # fmt: skip

    def test_a_value_may_hold_an_equals_sign(self, tmp_path: Path) -> None:
        assert load(tmp_path, "prompt.system=a=b").prompt.system == "a=b"

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("shards", "wanted KEY.KEY=VALUE"),
            ("=3", "wanted KEY.KEY=VALUE"),
            ("name.first=x", "name is not a mapping"),
            ("name.first.second=x", "the part before 'first' is not a mapping"),
            ("sources.1.limit=2", "'1' is not an index below 1"),
            ("sources.first.limit=2", "'first' is not an index below 1"),
            ("seed=[1", "not valid YAML"),
        ],
    )
    def test_an_override_that_fits_nowhere_says_why(
        self, tmp_path: Path, override: str, message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, override)
        assert message in str(caught.value)
        assert override in str(caught.value)


class TestWrongFields:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sampling__max_new_tokens": 3}, "sampling.max_new_tokens: no such key; did you mean max_tokens?"),
            ({"sampling__temprature": 3}, "sampling.temprature: no such key; did you mean temperature?"),
            ({"engine__scheduler__max_num_seq": 3}, "did you mean max_num_seqs?"),
            ({"engine__model": "x"}, "engine.model: no such key; did you mean model_path?"),
            ({"engine__tp": 2}, "engine.tp: no such key; did you mean tensor_parallel_size?"),
            ({"input": "x"}, "input: no such key; did you mean sources?"),
            ({"num_shards": 3}, "num_shards: no such key; did you mean shards?"),
            ({"sources": [{"path": "x", "colums": {}}]}, "sources.0.colums: no such key; did you mean columns?"),
            ({"sources": [{"path": "x", "columns": {"ids": "x"}}]}, "did you mean id?"),
        ],
    )  # fmt: skip
    def test_a_misspelt_key_is_told_the_right_one(
        self, tmp_path: Path, changes: dict[str, object], message: str
    ) -> None:
        assert message in complaint(tmp_path, **changes)

    def test_a_key_like_no_other_is_told_which_there_are(self, tmp_path: Path) -> None:
        assert (
            "output.zzz: no such key; known: path, format, errors_path, result_prefix"
            in complaint(tmp_path, output__zzz=1)
        )

    def test_every_wrong_field_is_listed_at_once(self, tmp_path: Path) -> None:
        message = complaint(tmp_path, shards=0, engine__dtype="int3", output__paht="x")
        assert message.startswith("job.yaml: 3 wrong field(s)\n")
        assert "shards: found 0" in message
        assert "engine.dtype: found 'int3'" in message
        assert "output.paht: no such key; did you mean path?" in message

    def test_a_missing_key_is_named(self, tmp_path: Path) -> None:
        mapping = job_mapping(tmp_path)
        del mapping["engine"]["model_path"]
        with pytest.raises(ConfigError, match=r"engine\.model_path: missing; this key is required"):
            validate_job_config(mapping, origin="job.yaml")

    def test_two_sources_of_one_name_must_be_told_apart(self, tmp_path: Path) -> None:
        sources = [{"path": "a/rows.jsonl"}, {"path": "b/rows.jsonl"}]
        assert "two sources are named 'rows'; give one of them a `name`" in complaint(
            tmp_path, sources=sources
        )
        sources[1]["name"] = "more"
        validate_job_config(job_mapping(tmp_path, sources=sources), origin="job.yaml")

    def test_a_job_id_cannot_leave_the_folder_of_runs(self, tmp_path: Path) -> None:
        assert "job_id: found '../x'" in complaint(tmp_path, job_id="../x")


class TestFile:
    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.yaml: cannot read .* No such file"):
            load_job_config(tmp_path / "none.yaml")

    def test_a_file_that_is_not_yaml_names_the_line(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("name: x\nsources: [\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"(?s)job\.yaml: not valid YAML: .*line 3"):
            load_job_config(tmp_path / "job.yaml")

    def test_a_file_that_is_not_utf8_is_a_config_error(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes(b"name: \xff\n")
        with pytest.raises(ConfigError, match=r"job\.yaml: .*UTF-8"):
            load_job_config(tmp_path / "job.yaml")

    @pytest.mark.parametrize("content", ["", "- a\n", "text\n"])
    def test_a_file_without_keys_is_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "job.yaml").write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match="wanted a mapping of keys to values"):
            load_job_config(tmp_path / "job.yaml")


class TestResolve:
    def test_paths_become_absolute_so_that_any_folder_can_resume_the_job(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        relative = validate_job_config(
            job_mapping(
                tmp_path, sources=[{"path": "rows.jsonl"}], output__path="out.jsonl",
                engine__device="cpu", engine__model_path="m", engine__tokenizer_path="t",
                engine__chat={"chat_template": "mine.jinja"},
                job_dir=None,
            ),
            origin="test",
        )  # fmt: skip
        config = resolve(relative)
        assert config.sources[0].path == str(tmp_path / "rows.jsonl")
        assert config.engine.model_path == str(tmp_path / "m")
        assert config.engine.tokenizer_path == str(tmp_path / "t")
        assert config.engine.chat.chat_template == str(tmp_path / "mine.jinja")
        assert output_path_of(config) == tmp_path / "out.jsonl"
        assert job_dir_of(config) == tmp_path / "runs" / "job-1"

    def test_resolving_twice_changes_nothing(self, tmp_path: Path) -> None:
        config = resolve(load(tmp_path))
        assert resolve(config) == config

    def test_a_job_without_an_id_gets_one_of_its_name(self, tmp_path: Path) -> None:
        first, second = resolve(load(tmp_path, "job_id=")), resolve(load(tmp_path, "job_id="))
        assert first.job_id is not None
        assert first.job_id.startswith("job-")
        assert first.job_id != second.job_id
        validate_job_config(first.model_dump(), origin="test")

    def test_what_the_ledger_keeps_can_be_read_again(self, tmp_path: Path) -> None:
        config = resolve(load(tmp_path))
        stored = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
        assert validate_job_config(stored, origin="test") == config


class TestLedgerUrl:
    def test_the_file_comes_before_the_variable_and_the_variable_before_the_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKENMILL_LEDGER_URL", "sqlite:///variable.sqlite")
        assert load(tmp_path, "ledger_url=").resolved_ledger_url == "sqlite:///variable.sqlite"
        assert load(tmp_path).resolved_ledger_url.endswith("ledger.sqlite")
        monkeypatch.delenv("TOKENMILL_LEDGER_URL")
        assert default_ledger_url() == "sqlite:///runs/ledger.sqlite"

    def test_the_command_to_resume_names_a_ledger_that_is_not_the_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKENMILL_LEDGER_URL", "sqlite:///variable.sqlite")
        assert resume_command(load(tmp_path, "ledger_url=")) == "tokenmill resume job-1"
        named = load(tmp_path, "ledger_url=sqlite:///my.sqlite")
        assert resume_command(named) == "tokenmill resume job-1 --ledger sqlite:///my.sqlite"


def test_a_wrong_key_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: job\n"
        "sources:\n"
        "  - path: rows.jsonl\n"
        "    limits: 3\n"
        "engine:\n"
        "  model_path: mock\n"
        "  scheduler: {max_num_seqs: 0}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_job_config(path)
    assert "line 4: sources.0.limits: no such key; did you mean limit?" in str(caught.value)
    assert "line 7: engine.scheduler.max_num_seqs: found 0" in str(caught.value)
