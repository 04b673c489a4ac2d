"""Text to token ids and back: prompts, chats, special tokens.

Owns everything that knows a tokenizer; the scheduler and the worker see ids only. The mock
tokenizer is bytes, so that a whole job runs without a model.

Control tokens that are spelt out, such as <|im_end|>: in a text prompt they are control tokens,
since a prompt may be rendered elsewhere and vLLM reads it so; in messages they stay text, since
there the chat template alone says where a turn ends.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.backends.npu_environment import without_torch_npu
from engine.chat_template import ChatTemplate, Message, without_surrogates
from engine.config import ChatConfig, EngineConfig
from engine.errors import ConfigError, RequestError, RequestErrorCode
from engine.model_checks import reason_of
from engine.model_source import ModelSource
from engine.request import GenerateRequest
from engine.token_checks import (
    as_integers,
    check_sampling,
    check_vocabulary,
    spell_bad_words,
    truncate,
)

_MOCK_FIRST_BYTE = 3
# Sets of bad words whose tokens are remembered: a job has one, and rows rarely many.
_MAX_KNOWN_BAD_WORDS = 256


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens; is_truncated when truncate_prompt_tokens has cut some off."""

    token_ids: list[int]
    is_truncated: bool = False


class Tokenizer(ABC):
    """Encodes requests and decodes answers for one model; safe to use from several threads."""

    bos_token_id: int | None = None

    def __init__(self, *, vocab_size: int, chat: ChatConfig) -> None:
        self.vocab_size = vocab_size
        self.bad_words_token_ids = lru_cache(_MAX_KNOWN_BAD_WORDS)(self._spell_bad_words)
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
        """Return the prompt's token ids, see encode."""
        return self.encode(request).token_ids

    def encode(self, request: GenerateRequest) -> EncodedPrompt:
        """Turn a prompt into tokens, as many as its truncate_prompt_tokens allows.

        What the sampling parameters say of tokens is checked too.

        Raises:
            RequestError: no prompt or more than one kind, an empty prompt, messages that the chat
                template refuses, a token id outside the vocabulary, or a prompt that cannot be
                truncated so far.
        """
        params = request.sampling_params
        check_sampling(params, self.vocab_size)
        self.bad_words_token_ids(params.bad_words)
        token_ids = self._encode_prompt(request)
        limit = params.truncate_prompt_tokens
        if limit is None or len(token_ids) <= limit:
            return EncodedPrompt(token_ids=token_ids)
        kept = truncate(
            token_ids,
            limit,
            num_fixed=self._num_fixed_tokens(request, token_ids),
            bos_token_id=self.bos_token_id,
        )
        return EncodedPrompt(token_ids=kept, is_truncated=True)

    def _encode_prompt(self, request: GenerateRequest) -> list[int]:
        names = ("prompt", "messages", "prompt_token_ids")
        given = [name for name in names if getattr(request, name) is not None]
        if len(given) != 1:
            raise RequestError(
                RequestErrorCode.BAD_ROW,
                f"found {' and '.join(given) or 'no prompt'}; wanted exactly one of prompt, "
                "messages, prompt_token_ids",
            )
        if request.prompt_token_ids is not None:
            token_ids = as_integers(request.prompt_token_ids)
        elif request.messages is not None:
            token_ids = self._encode_messages(request.messages, add_generation_prompt=True)
        elif isinstance(request.prompt, str):
            token_ids = self._encode_text(without_surrogates(request.prompt))
        else:
            kind = type(request.prompt).__name__
            raise RequestError(RequestErrorCode.BAD_ROW, f"prompt is a {kind}, wanted a string")
        if not token_ids:
            raise RequestError(
                RequestErrorCode.PROMPT_EMPTY, "the prompt has no token; give it some text"
            )
        check_vocabulary(given[0], token_ids, self.vocab_size)
        return token_ids

    def _encode_messages(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> list[int]:
        try:
            if not len(messages):
                return []
            return self._encode_chat(messages, add_generation_prompt=add_generation_prompt)
        except RequestError:
            raise
        # A template runs the model's code over the user's data and may raise anything.
        except Exception as error:
            raise RequestError(
                RequestErrorCode.BAD_TEMPLATE,
                f"the chat template refuses the messages: {error or repr(error)}",
            ) from error

    def _num_fixed_tokens(self, request: GenerateRequest, token_ids: list[int]) -> int:
        """Return how many tokens the generation prompt at the end of a chat has."""
        if request.messages is None:
            return 0
        without = self._encode_messages(request.messages, add_generation_prompt=False)
        pairs = zip(without, token_ids, strict=False)
        num_common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(without))
        return len(token_ids) - num_common

    def token_text(self, token_id: int) -> str:
        """Return the text that the token adds behind other text, special tokens as written.

        Behind a letter: some tokenizers drop the space with which a text begins. A token that is
        a part of a character gives U+FFFD.
        """
        before = self._encode_bare("a")
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return text[len(self.decode(before, skip_special_tokens=False)) :]

    def _spell_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return spell_bad_words(without_surrogates(words), self._encode_bare, self.vocab_size)

    def control_token_ids(self, words: Sequence[str]) -> list[int]:
        """Return the tokens that are spelt by these words and are no part of a text."""
        return []

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Return what decides how text becomes tokens: files, chat template and its options."""

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_bare(self, text: str) -> list[int]:
        """Encode without special tokens around the text."""

    @abstractmethod
    def _encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> list[int]: ...


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers.

    It is asked by one thread at a time: encoding as plain text is a state of the whole tokenizer,
    in which another thread's control tokens would be text, and the other way round.
    """

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        with without_torch_npu():
            from transformers import AutoTokenizer
            from transformers.utils.import_utils import is_torch_npu_available

            is_torch_npu_available()  # it remembers the answer

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
                f"{folder}: no usable tokenizer ({reason_of(error)}); set engine.tokenizer_path"
            ) from error
        self.bos_token_id = self._tokenizer.bos_token_id
        self._lock = threading.Lock()
        self._chat_template = ChatTemplate(config.chat, self._tokenizer)
        added_tokens = self._tokenizer.added_tokens_decoder
        self._control_token_ids = {
            token.content: token_id for token_id, token in added_tokens.items() if token.special
        }

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens."""
        return str(
            self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of the tokenizer, of the chat template and of its options."""
        backend = self._tokenizer.backend_tokenizer.to_str()
        return {
            "tokenizer": _short_hash(backend.encode("utf-8", "surrogatepass")),
            "chat_template": _short_hash(self._chat_template.text.encode("utf-8", "surrogatepass")),
            "chat_options": _hash_of_options(self._chat),
            "system_role": self._chat_template.system_role,
        }

    def control_token_ids(self, words: Sequence[str]) -> list[int]:
        """Return the tokens that are spelt by these words and are no part of a text."""
        return [self._control_token_ids[word] for word in words if word in self._control_token_ids]

    def _encode_text(self, text: str) -> list[int]:
        with self._lock:
            ids = list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        # A prompt that was rendered elsewhere may bring the BOS token that is added here.
        bos = self.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _encode_bare(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> list[int]:
        with self._lock:
            return self._chat_template.encode(messages, add_generation_prompt=add_generation_prompt)


class MockTokenizer(Tokenizer):
    """One token for each byte of UTF-8, so that lengths and texts are easy to reason about."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the bytes as text; ids that stand for no byte are left out."""
        data = bytes(
            token - _MOCK_FIRST_BYTE
            for token in token_ids
            if _MOCK_FIRST_BYTE <= token < _MOCK_FIRST_BYTE + 256
        )
        return data.decode("utf-8", "replace")

    def fingerprint(self) -> dict[str, str]:
        """Return the one tokenizer there is."""
        options = _hash_of_options(self._chat)
        return {"tokenizer": "mock", "chat_template": "mock", "chat_options": options}

    def _encode_text(self, text: str) -> list[int]:
        return [byte + _MOCK_FIRST_BYTE for byte in text.encode("utf-8")]

    def _encode_bare(self, text: str) -> list[int]:
        return self._encode_text(text)

    def _encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> list[int]:
        lines = [f"{m.get('role', '')}: {m.get('content', '')}\n" for m in messages]
        end = "assistant: " if add_generation_prompt else ""
        return self._encode_text(without_surrogates("".join(lines) + end))


def _hash_of_options(chat: ChatConfig) -> str:
    return _short_hash(msgspec.json.encode([chat.chat_template_kwargs, chat.tools]))


def _short_hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
