"""What a user sets about the engine, one frozen section for each part that receives it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SchedulerConfig(Section):
    """Limits and order of the batches."""

    max_num_seqs: int = Field(default=64, ge=1, description="Most requests in one step.")
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Most tokens in one step, prefill and decode together."
    )
    kv_reservation: Literal["full", "grow"] = Field(
        default="grow",
        description="full reserves KV blocks for max_tokens at admission and never preempts; "
        "grow takes blocks as the text grows and preempts when they run out.",
    )
    num_steps_in_flight: Literal[1, 2] = Field(
        default=1, description="2 schedules the next step while the device runs this one."
    )

    @model_validator(mode="after")
    def _room_for_every_running_request(self) -> "SchedulerConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"{self.max_num_seqs}; each running request needs one token a step"
            )
        return self


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = Field(default=16, ge=1, description="Tokens in one KV block.")
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks; left out, they are counted from free memory."
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory for the KV cache in GiB; left out, see memory_fraction.",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the free memory for the KV cache; left out, 0.25 on the CPU and 0.9 "
        "on an NPU or GPU.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse KV blocks of equal prompt beginnings."
    )


class ChatConfig(Section):
    """How messages become a prompt."""

    chat_template: str | None = Field(
        default=None, description="A Jinja template, or the path of one, instead of the model's."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template, such as enable_thinking."
    )
    tools: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Tool definitions in OpenAI's form, given to the template.",
    )


class RuntimeConfig(Section):
    """Processes, time-outs, and where things are run."""

    inline: bool = Field(
        default=False, description="Run the worker inside this process, for debugging."
    )
    start_timeout_seconds: float = Field(
        default=600, gt=0, description="How long loading the model may take."
    )
    watchdog_seconds: float = Field(
        default=300, gt=0, description="A step that takes longer means that the worker hangs."
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of a worker; left out, the cores of this process.",
    )
    mock_step_seconds: float = Field(
        default=0.0, ge=0, description="What one step of the mock device takes."
    )


class EngineConfig(Section):
    """Everything that the engine needs to know; each part receives its own section."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: str = Field(description="Folder with config.json, safetensors and the tokenizer.")
    tokenizer_path: str | None = Field(
        default=None, description="Folder of the tokenizer; the model's folder when left out."
    )
    device: Literal["auto", "cpu", "cuda", "npu", "mock"] = Field(
        default="auto",
        description="auto takes an NPU, else a GPU, else the CPU; mock answers by rule, without a model.",
    )
    device_ids: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="Logical devices that engines may use."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto takes the dtype that the checkpoint was saved in."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Devices that share one model.")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and answer together; the model's own limit when left out.",
    )
    generation_config: Literal["model", "ignore"] = Field(
        default="model",
        description="model takes sampling defaults from the model's generation_config.json, as vLLM does.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model."
    )
    cache_dir: Path | None = Field(
        default=None, description="Where converted weights and compiled kernels are kept."
    )
    log_dir: Path | None = Field(
        default=None, description="Where worker logs go; a temporary folder when left out."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    @model_validator(mode="after")
    def _devices_fit_the_ranks(self) -> "EngineConfig":
        if len(set(self.device_ids)) != len(self.device_ids):
            raise ValueError(f"device_ids {list(self.device_ids)} names a device twice")
        if self.device == "cpu" and self.device_ids != (0,):
            raise ValueError(
                f"device_ids {list(self.device_ids)}: the cpu is one device, write [0]"
            )
        if len(self.device_ids) % self.tensor_parallel_size:
            raise ValueError(
                f"{len(self.device_ids)} device_ids cannot be shared out to engines of "
                f"tensor_parallel_size {self.tensor_parallel_size}"
            )
        return self
