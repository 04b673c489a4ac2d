"""From chat messages to tokens: the template, its options, and what it does not take.

Control tokens that the template writes are control tokens; those inside of messages stay text.
"""

import logging
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from engine.config import ChatConfig
from engine.errors import ConfigError, RequestError, RequestErrorCode

logger = logging.getLogger(__name__)

Message = dict[str, Any]
_SYSTEM_ROLES = ("system", "developer")
_USER: Message = {"role": "user", "content": "x"}
_PROBE = "probe-of-the-chat-template"
_SURROGATES = re.compile("[\ud800-\udfff]")
_CLOCK_CALL = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ChatTemplate:
    """The chat template of one tokenizer of transformers, or the one that was set instead.

    text is the template as it was written, empty when there is none.

    Templates differ in whether they take system messages (else engine.chat.system_role says what
    happens) and content in parts (else the parts become lines of one text). A few renderings tell,
    when it is made.

    Raises:
        ConfigError: the template that is set is neither a template nor a file.
    """

    def __init__(self, config: ChatConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        template = _read_template(config) or tokenizer.chat_template
        self.text = str(template or "")
        tokenizer.chat_template = _dated(template, config.now or datetime.now())
        if "strftime_now(" in str(tokenizer.chat_template):
            logger.warning("the chat template computes the format of a date: rows may have others")
        self._control_tokens = _pattern_of(tokenizer.added_tokens_encoder)
        self._takes_parts = self._probe_parts()
        self._refused_roles = self._probe_roles()
        self._told_roles: set[str] = set()

    @property
    def system_role(self) -> str:
        """What happens to system messages: the policy, where the template makes one necessary."""
        return self._config.system_role if self._refused_roles else "by template"

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            RequestError: there is no template, or it refuses a system message.
            Exception: the template may raise anything over messages that it does not expect.
        """
        if not self.text:
            raise RequestError(
                RequestErrorCode.BAD_ROW,
                "the row has messages but the tokenizer has no chat template; set "
                "engine.chat.chat_template, or prompt.format: text",
            )
        clean = [self._settle_parts(message) for message in without_surrogates(list(messages))]
        settled = self._settle_system_messages(clean)
        return list(self._apply(settled, add_generation_prompt=add_generation_prompt))

    def _apply(
        self, messages: list[Message], *, tokenize: bool = True, add_generation_prompt: bool = True
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(self._config.tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=False,
            sanitize_control_tokens=tokenize,
            **self._config.chat_template_kwargs,
        )

    def _settle_parts(self, message: Message) -> Message:
        """Write content in parts as one text, where the template does not join them itself."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        texts = [_text_of_part(part) for part in content]
        if not self._takes_parts:
            return message | {"content": "\n".join(texts)}
        # Two parts may spell a control token that neither holds; in one text it is found.
        joined = "".join(text.strip() for text in texts)
        num_spelt = sum(len(self._control_tokens.findall(text)) for text in texts)
        if len(self._control_tokens.findall(joined)) > num_spelt:
            texts = ["".join(texts)]
        return message | {"content": [{"type": "text", "text": text} for text in texts]}

    def _settle_system_messages(self, messages: list[Message]) -> list[Message]:
        found = [message.get("role") for message in messages]
        refused = [role for role in self._refused_roles if role in found]
        if not refused:
            return messages
        problem = f"the chat template takes no {refused[0]} message"
        reason, policy = self._refused_roles[refused[0]], self._config.system_role
        if policy == "error":
            raise RequestError(
                RequestErrorCode.BAD_TEMPLATE,
                f"{problem} ({reason}); set engine.chat.system_role to fold, which puts its text "
                "before that of the next user message, or to drop, or take it out of the row",
            )
        if not self._told_roles.issuperset(refused):
            self._told_roles.update(refused)
            logger.warning("%s (%s); engine.chat.system_role is %s", problem, reason, policy)
        if policy == "drop":
            return [message for message in messages if message.get("role") not in refused]
        return fold_system_messages(messages, refused)

    def _probe_parts(self) -> bool:
        """Tell whether the template writes the text of a part, and not the part as it stands."""
        text = self._try({"role": "user", "content": [{"type": "text", "text": _PROBE}]})
        if isinstance(text, Exception):
            return isinstance(self._try(_USER), Exception)  # the parts were not to blame
        is_quoted = any(f"{quote}{_PROBE}{quote}" in text for quote in "'\"")
        return _PROBE in text and not is_quoted

    def _probe_roles(self) -> dict[str, str]:
        """Return the system roles that the template turns down, and how."""
        refused: dict[str, str] = {}
        if isinstance(self._try(_USER), Exception):
            return refused  # it wants more than this; each row is told what
        for role in _SYSTEM_ROLES:
            text = self._try({"role": role, "content": _PROBE}, _USER)
            if isinstance(text, Exception):
                refused[role] = f"it says: {text}"
            elif _PROBE not in text:
                refused[role] = "it leaves it out"
        return refused

    def _try(self, *messages: Message) -> str | Exception:
        try:
            return str(self._apply(list(messages), tokenize=False))
        except Exception as error:  # noqa: BLE001 - the model's code, which may raise anything
            return error


def fold_system_messages(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Put the text of messages of some roles in front of the next user message.

    What no user message follows becomes one itself.
    """
    folded: list[Message] = []
    held = ""
    for message in messages:
        if message.get("role") in roles:
            held += f"{_text_of(message.get('content'))}\n\n"
        elif held and message.get("role") == "user":
            content: Any = message.get("content") or ""
            begin: Any = [{"type": "text", "text": held}] if isinstance(content, list) else held
            folded.append(message | {"content": begin + content})
            held = ""
        else:
            folded.append(message)
    if held:
        folded.append({"role": "user", "content": held.removesuffix("\n\n")})
    return folded


def without_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which no tokenizer takes, by U+FFFD, in texts at any depth."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {key: without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def _text_of(content: Any) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    is_list = isinstance(content, list)
    return "".join(part["text"] for part in content) if is_list else str(content or "")


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(
            RequestErrorCode.BAD_ROW,
            f"the content of a message holds a part {kind!r}, wanted text alone: "
            '{"type": "text", "text": "..."}',
        )
    return text


def _pattern_of(tokens: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted((t for t in tokens if not t.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _dated(template: Any, now: datetime) -> Any:
    """Write in the dates of one moment, where a template would ask the clock at every row."""
    if isinstance(template, dict):  # by name
        return {name: _dated(text, now) for name, text in template.items()}
    return template and _CLOCK_CALL.sub(lambda call: repr(now.strftime(call[2])), template)


def _read_template(config: ChatConfig) -> str | None:
    """Return the template: itself, or the file that it names."""
    path = config.template_path
    if path is None:
        return config.chat_template
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"engine.chat.chat_template: {config.chat_template!r} is neither a template nor a "
            f"readable file ({error.strerror})"
        ) from error
