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


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Sampling of one request. Fields left out keep the default shown here.

    `model_fields_set` tells what was given from what is default, so that a job's sampling can be
    laid over the model's own generation_config, and a row's over the job's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(
        default=256,
        ge=1,
        description="Most tokens to generate; reaching it is finish_reason length.",
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
    top_k: int = Field(default=0, ge=0, description="Keep this many likeliest tokens; 0 keeps all.")
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0,
        description="Drop tokens less likely than this share of the likeliest token's probability.",
    )  # fmt: skip
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Seed of the draws; the job's seed when left out."
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = Field(
        default=(), description="Strings that end the text; the text is cut before them."
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Token ids that end the generation, besides the model's EOS ids."
    )
    ignore_eos: bool = Field(default=False, description="Go on after the model's EOS tokens.")

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it"
            )
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty string; remove it")
        return self

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken and no number is drawn."""
        return self.temperature == 0.0

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
