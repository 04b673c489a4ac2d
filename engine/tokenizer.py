"""Text to token ids and back: prompts, chat templates, incremental decoding.

Owns everything that knows a tokenizer; the scheduler and the worker see ids only. The mock
tokenizer is bytes, so that a whole job runs without a model.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from engine.config import ChatConfig, EngineConfig
from engine.errors import ConfigError, RequestError, RequestErrorCode
from engine.model_source import ModelSource
from engine.request import GenerateRequest

_MOCK_FIRST_BYTE = 3
_REPLACEMENT = "\ufffd"


class Tokenizer(ABC):
    """Encodes requests and decodes answers for one model; safe to use from several threads."""

    def __init__(self, *, vocab_size: int, chat: ChatConfig) -> None:
        self.vocab_size = vocab_size
        self._chat = chat

    @staticmethod
    def load(config: EngineConfig, source: ModelSource) -> "Tokenizer":
        """Load the tokenizer that belongs to the model.

        Raises:
            ConfigError: the folder holds no usable tokenizer, or a chat template does not exist.
        """
        if source.is_mock:
            return MockTokenizer(vocab_size=source.vocab_size, chat=config.chat)
        return PretrainedTokenizer(config, source)

    def encode_request(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            RequestError: no prompt or more than one kind, an empty prompt, messages that the chat
                template refuses, or a token id outside the vocabulary.
        """
        given = [
            name
            for name in ("prompt", "messages", "prompt_token_ids")
            if getattr(request, name) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                RequestErrorCode.BAD_ROW,
                f"found {' and '.join(given) or 'no prompt'}; wanted exactly one of prompt, "
                "messages, prompt_token_ids",
            )
        if request.prompt_token_ids is not None:
            token_ids = _as_integers(request.prompt_token_ids)
        elif request.messages is not None:
            token_ids = self._encode_chat(request.messages)
        else:
            assert request.prompt is not None
            token_ids = self._encode_text(_without_surrogates(request.prompt))
        if not token_ids:
            raise RequestError(
                RequestErrorCode.PROMPT_EMPTY, "the prompt has no token; give it some text"
            )
        self._check_vocabulary(given[0], token_ids)
        return token_ids

    def _check_vocabulary(self, source: str, token_ids: list[int]) -> None:
        """Refuse ids that the model has no embedding for; a tokenizer may know more tokens."""
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            raise RequestError(
                RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
                f"{source} holds token {lowest if lowest < 0 else highest}; the model knows 0 to "
                f"{self.vocab_size - 1}",
            )

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens, special tokens left out."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Return what decides how text becomes tokens: files, chat template and its options."""

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]: ...


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers. Special tokens inside a user's content stay literal text."""

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        from transformers import AutoTokenizer

        super().__init__(vocab_size=source.vocab_size, chat=config.chat)
        folder = config.tokenizer_path or config.model_path
        if not Path(folder).is_dir():
            raise ConfigError(f"engine.tokenizer_path: found no folder {folder}")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{folder}: no usable tokenizer ({error}); set engine.tokenizer_path"
            ) from error
        self._chat_template = _read_template(config.chat.chat_template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens, special tokens left out."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of the tokenizer, of the chat template and of its options."""
        options = msgspec.json.encode([self._chat.chat_template_kwargs, self._chat.tools])
        template = self._chat_template or self._tokenizer.chat_template or ""
        backend = self._tokenizer.backend_tokenizer.to_str()
        return {
            "tokenizer": _short_hash(backend.encode("utf-8", "surrogatepass")),
            "chat_template": _short_hash(str(template).encode("utf-8", "surrogatepass")),
            "chat_options": _short_hash(options),
        }

    def _encode_text(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        # A prompt that was rendered elsewhere may bring the BOS token that is added here.
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        from jinja2 import TemplateError

        if self._chat_template is None and not self._tokenizer.chat_template:
            raise RequestError(
                RequestErrorCode.BAD_ROW,
                "the row has messages but the tokenizer has no chat template; set "
                "engine.chat.chat_template, or prompt.format: text",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                _clean_messages(messages),
                chat_template=self._chat_template,
                tools=list(self._chat.tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **self._chat.chat_template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                RequestErrorCode.BAD_TEMPLATE, f"the chat template refuses the messages: {error}"
            ) from error
        return list(ids)


class MockTokenizer(Tokenizer):
    """One token for each byte of UTF-8, so that lengths and texts are easy to reason about."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the bytes as text; ids that stand for no byte are left out."""
        data = bytes(
            token - _MOCK_FIRST_BYTE
            for token in token_ids
            if _MOCK_FIRST_BYTE <= token < _MOCK_FIRST_BYTE + 256
        )
        return data.decode("utf-8", "replace")

    def fingerprint(self) -> dict[str, str]:
        """Return the one tokenizer there is."""
        options = msgspec.json.encode([self._chat.chat_template_kwargs, self._chat.tools])
        return {"tokenizer": "mock", "chat_template": "mock", "chat_options": _short_hash(options)}

    def _encode_text(self, text: str) -> list[int]:
        return [byte + _MOCK_FIRST_BYTE for byte in text.encode("utf-8")]

    def _encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        lines = [f"{m.get('role', '')}: {m.get('content', '')}\n" for m in messages]
        return self._encode_text(_without_surrogates("".join(lines) + "assistant: "))


class IncrementalDecoder:
    """Turns a growing list of tokens into a growing text.

    Decodes from a token that began a piece of text of its own, so that the cost of a token does
    not grow with the text, and holds back a tail that is not yet a whole character. At the end
    the text equals decoding the whole sequence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._prefix_start = 0
        self._read_until = 0

    def push(self, token_id: int) -> str:
        """Add one token and return the text that became certain, often the token's own."""
        self._token_ids.append(token_id)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        window = self._token_ids[self._prefix_start :]
        known = self._tokenizer.decode(window[: self._read_until - self._prefix_start])
        text = self._tokenizer.decode(window)
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and not is_end):
            return ""
        self._prefix_start, self._read_until = self._read_until, len(self._token_ids)
        return text[len(known) :]


def _as_integers(token_ids: Sequence[int]) -> list[int]:
    """Return the numbers of a list, a numpy array or a tensor of one dimension."""
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise RequestError(
            RequestErrorCode.BAD_ROW, f"prompt_token_ids holds something else: {error}"
        ) from error


def _read_template(template: str | None) -> str | None:
    """Return the template: itself, or the file that it names."""
    if template is None or "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"engine.chat.chat_template: {template!r} is neither a template nor a readable file "
            f"({error.strerror})"
        ) from error


def _clean_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: _without_surrogates(v) if isinstance(v, str) else v for k, v in message.items()}
        for message in messages
    ]


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes, by U+FFFD."""
    return (
        text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if not text.isascii()
        else text
    )


def _short_hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
