"""How one request is sampled: the names and the meaning of vLLM's SamplingParams."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from engine.errors import RequestError, RequestErrorCode

# Names users bring from other tools, and ours for the same thing.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
}

# Token ids and counts travel to the worker and into its tensors.
_INT32_END = 2**31
_MAX_LOGPROBS = 1000

_TokenId = Annotated[int, Field(ge=0, lt=_INT32_END)]
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
_Text = Annotated[str, Field(min_length=1)]
_Word = Annotated[str, Field(pattern=r"\S")]
_NumLogprobs = Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)]


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Sampling of one request. Fields left out keep the default shown here.

    `model_fields_set` tells what was given from what is default, so that a job's sampling can be
    laid over the model's own generation_config, and a row's over the job's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(default=1, ge=1, le=1024, description="Answers to each prompt.")
    max_tokens: int = Field(
        default=256,
        ge=0,
        lt=_INT32_END,
        description="Most tokens to generate; reaching it is finish_reason length. 0 scores the "
        "prompt and needs prompt_logprobs.",
    )
    min_tokens: int = Field(
        default=0, ge=0, description="No EOS, stop token or stop string before this many tokens."
    )
    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="0 is greedy; 1 samples the model's distribution.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Keep the likeliest tokens of this total probability.",
    )
    top_k: int = Field(
        default=0, ge=0, lt=_INT32_END, description="Keep this many likeliest tokens; 0 keeps all."
    )
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0,
        description="Drop tokens less likely than this share of the likeliest token's probability.",
    )  # fmt: skip
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Seed of the draws; the job's seed when left out."
    )
    stop: Annotated[tuple[_Text, ...], BeforeValidator(_one_or_many)] = Field(
        default=(),
        description="Strings that end the text; the text is cut before them. One that is the name "
        "of a control token, such as <|im_end|>, means that token.",
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="Leave the stop string, or the stop token's text, in the text."
    )
    stop_token_ids: tuple[_TokenId, ...] = Field(
        default=(), description="Token ids that end the generation, besides the model's EOS ids."
    )
    ignore_eos: bool = Field(default=False, description="Go on after the model's EOS tokens.")
    presence_penalty: _Penalty = Field(
        default=0.0, description="Taken from the logit of each token that was generated before."
    )
    frequency_penalty: _Penalty = Field(
        default=0.0, description="Taken from a token's logit once for each time it was generated."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0.0, le=100.0,
        description="Above 1, tokens of the prompt and of the answer become less likely: positive "
        "logits are divided by it, negative ones multiplied.",
    )  # fmt: skip
    logit_bias: dict[_TokenId, _Bias] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}},
        description="Added to the logits of these token ids.",
    )
    bad_words: Annotated[tuple[_Word, ...], BeforeValidator(_one_or_many)] = Field(
        default=(), description="Words that are never generated, with or without a space before."
    )
    logprobs: _NumLogprobs | None = Field(
        default=None,
        description="Log probabilities of each generated token and of so many likeliest ones, from "
        "the model's own logits, before any other parameter.",
    )
    prompt_logprobs: _NumLogprobs | None = Field(
        default=None, description="The same for each token of the prompt but the first."
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=_INT32_END,
        description="Keep only so many tokens of a longer prompt: its end, and a BOS before it.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens is 0, which only scores a prompt; set prompt_logprobs, or raise it"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it"
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken and no number is drawn."""
        return self.temperature == 0.0

    @property
    def is_scoring_only(self) -> bool:
        """True when the prompt is scored and nothing is generated."""
        return self.max_tokens == 0

    def given(self) -> dict[str, Any]:
        """Return the fields that were set, not those that are default."""
        return self.model_dump(include=self.model_fields_set)

    def overlaid(self, overrides: Mapping[str, Any]) -> "SamplingParams":
        """Return these params with `overrides` laid over them, validated.

        Raises:
            RequestError: a name that does not exist or a value out of range, named.
        """
        if not overrides:
            return self
        given = self.given() | dict(overrides)
        try:
            return SamplingParams.model_validate(given)
        except ValidationError as error:
            raise RequestError(
                RequestErrorCode.INVALID_SAMPLING_PARAMS, describe_sampling_error(error)
            ) from error


def describe_sampling_error(error: ValidationError) -> str:
    """Say in one line which sampling fields are wrong and what to write instead."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "sampling"
        if item["type"] == "extra_forbidden":
            known = ", ".join(SamplingParams.model_fields)
            hint = f"write {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else f"known: {known}"
            lines.append(f"sampling parameter {name!r} does not exist; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"sampling parameter {name} is {item['input']!r}: {message}")
    return "; ".join(lines)
