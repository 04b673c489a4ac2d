"""How a row's columns become what the model is asked: Jinja templates and the chat form."""

from collections.abc import Sized
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, UndefinedError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine import ConfigError, RequestError, RequestErrorCode
from flows.config import ColumnMapping, PromptConfig
from flows.row_fields import (
    read_messages,
    read_priority,
    read_prompt_text,
    read_prompt_token_ids,
    read_sampling,
    read_timeout_seconds,
    read_turns,
)
from flows.rows import shown_names, without_surrogates
from flows.sources.openai_batch import is_batch_request
from flows.time_limit import row_time_limit

_SYSTEM_ROLES = ("system", "developer")
_MAX_RESULT_SIZE = 1 << 24


class PromptBuilder:
    """Builds what a row asks from its columns; templates are compiled once.

    Raises:
        ConfigError: a template does not compile, or a setting could never have an effect.
    """

    def __init__(self, prompt: PromptConfig) -> None:
        environment = _make_environment()
        self._template = _compile(environment, "prompt.template", prompt.template)
        self._system = _compile(environment, "prompt.system", prompt.system)
        self._is_chat = prompt.format == "chat"
        if self._system is not None and not self._is_chat:
            raise ConfigError(
                "prompt.system is set and prompt.format is text, which has no system message; "
                "write format: chat, or put the text into prompt.template"
            )

    def build(
        self,
        columns: dict[str, Any],
        mapping: ColumnMapping,
        *,
        fields: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what is asked, as the fields of a PromptRecord.

        Args:
            columns: the row as it was written; templates see it.
            mapping: which column holds what.
            fields: the columns with values of the types that are wanted, where the row's format
                has other ones.

        Raises:
            RequestError: no prompt, several, one of a wrong type, or a template that fails.
        """
        fields = columns if fields is None else fields
        asked = self._prompt_of(fields, columns, mapping)
        asked["sampling"] = read_sampling(fields, mapping)
        asked["priority"] = read_priority(fields, mapping)
        asked["timeout_seconds"] = read_timeout_seconds(fields, mapping)
        return asked

    def _prompt_of(
        self, fields: dict[str, Any], columns: dict[str, Any], mapping: ColumnMapping
    ) -> dict[str, Any]:
        if self._template is not None:
            return self._from_text(_render("prompt.template", self._template, columns), columns)
        names = mapping.prompt_columns
        present = [name for name in names if fields.get(name) is not None]
        if len(present) != 1:
            raise _not_one_prompt(present, names, fields)
        if present[0] == mapping.prompt:
            return self._from_text(read_prompt_text(fields, mapping), columns)
        if present[0] == mapping.messages:
            messages = without_surrogates(read_messages(fields, mapping))
            return {"messages": self._with_system(messages, columns)}
        if present[0] == mapping.prompt_token_ids:
            return {"prompt_token_ids": read_prompt_token_ids(fields, mapping)}
        turns = tuple(without_surrogates(read_turns(fields, mapping)))
        first = [{"role": "user", "content": turns[0]}]
        return {"messages": self._with_system(first, columns), "turns": turns}

    def _from_text(self, text: str, columns: dict[str, Any]) -> dict[str, Any]:
        clean = without_surrogates(text)
        if not self._is_chat:
            return {"prompt": clean}
        return {"messages": self._with_system([{"role": "user", "content": clean}], columns)}

    def _with_system(
        self, messages: list[dict[str, Any]], columns: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if self._system is None or any(m["role"] in _SYSTEM_ROLES for m in messages):
            return messages
        content = without_surrogates(_render("prompt.system", self._system, columns))
        return [{"role": "system", "content": content}, *messages]


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, without arithmetic that would take all memory or hours within one step."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Work out `left operator right`, unless the result would be too large."""
        if _size_of_result(operator, left, right) > _MAX_RESULT_SIZE:
            raise OverflowError(f"the result of {operator} is too large for a template")
        return super().call_binop(context, operator, left, right)


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Return how many bits a number would have, or how many items a text or a list."""
    match left, right:
        case int(), int() if operator == "**":
            return left.bit_length() * right
        case int(), int():
            return left.bit_length() + right.bit_length()
        case Sized(), int():
            return len(left) * right
        case int(), Sized():
            return left * len(right)
    return 0


def _make_environment() -> ImmutableSandboxedEnvironment:
    # Immutable: a template may not change the columns that are carried to the output. The newline
    # that ends a template is dropped (Jinja's default): it is YAML's, not the user's.
    environment = _Sandbox(undefined=StrictUndefined)
    # A row is rendered at plan, in its shard and at each resume, and must come out the same.
    del environment.filters["random"]
    del environment.globals["lipsum"]
    return environment


def _compile(
    environment: ImmutableSandboxedEnvironment, name: str, source: str | None
) -> Template | None:
    if source is None:
        return None
    try:
        template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{name}, line {error.lineno}: not a valid Jinja template: {error.message}"
        ) from error
    # Jinja works out constants, and Python compiles what Jinja has written.
    except Exception as error:
        raise ConfigError(
            f"{name}: cannot be compiled: {type(error).__name__}: {error}; make it simpler"
        ) from error
    # Each rendering copies the globals, and Jinja's ChainMap of them is slow to copy.
    template.globals = dict(template.globals)
    return template


def _render(name: str, template: Template, columns: dict[str, Any]) -> str:
    try:
        with row_time_limit:
            return template.render(columns)
    except UndefinedError as error:
        raise RequestError(
            RequestErrorCode.BAD_TEMPLATE,
            f"{name}: {error.message}; the row's columns are {shown_names(columns)}; "
            "mend the row, or write default(...) in the template",
        ) from error
    # A template runs the user's code over the user's data and may raise anything.
    except Exception as error:
        raise RequestError(
            RequestErrorCode.BAD_TEMPLATE,
            f"{name} fails on this row: {type(error).__name__}: {error}",
        ) from error


def _not_one_prompt(
    present: list[str], names: tuple[str, ...], columns: dict[str, Any]
) -> RequestError:
    if present:
        message = (
            f"several prompts: {shown_names(present)}; keep one and set the others to null, or "
            "name other columns in the source's columns"
        )
    elif is_batch_request(columns):
        message = (
            "no prompt, but custom_id and body: this is a line of an OpenAI batch file; write "
            "format: openai_batch in the source"
        )
    else:
        message = (
            f"no prompt: wanted one of the columns {shown_names(names)}, found "
            f"{shown_names(columns)}; name the column in the source's columns.prompt, or write "
            "prompt.template"
        )
    return RequestError(RequestErrorCode.BAD_ROW, message)
