"""What a user sets about the engine, one frozen section for each part that receives it."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# What a waiting prompt may have on average before fewer than max_waiting_requests wait. In memory a
# token is a Python int.
_TOKENS_OF_WAITING = 1024
OrderPolicy = Literal["fcfs", "priority", "shortest_first", "longest_first", "prefix"]


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
    order: OrderPolicy = Field(
        default="priority",
        description="Who is admitted first: fcfs, the lower priority number (the longer one waits "
        "the more it counts), the shortest or longest request, or those that share a prefix.",
    )
    aging_requests: int = Field(
        default=256,
        ge=1,
        description="With order priority: one level is worth this many later arrivals, so nobody "
        "waits for ever.",
    )
    max_waiting_requests: int = Field(
        default=1024,
        ge=1,
        description="Requests read ahead, among which the order chooses; fewer, where their prompts "
        "have more than 1024 tokens on average.",
    )
    batching: Literal["continuous", "dynamic", "static"] = Field(
        default="continuous",
        description="continuous lets requests join at any step; dynamic lets them join in groups; "
        "static runs one batch to its end before the next.",
    )
    max_batch_size: int | None = Field(
        default=None, ge=1, description="With dynamic and static: requests of a group or batch."
    )
    max_wait_ms: float = Field(
        default=50.0,
        ge=0,
        description="With dynamic and static: how long a group waits to be filled; dynamic waits "
        "less when the arrivals of the last seconds say that it does not pay.",
    )
    max_prefill_fraction: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Most of a step that one long prompt may take while others want it too.",
    )
    long_request_tokens: int | None = Field(
        default=None, ge=1, description="Prompts longer than this go into a lane of their own."
    )
    max_long_requests: int | None = Field(
        default=None, ge=1, description="Most requests of that lane that run at a time."
    )
    num_steps_in_flight: Literal[1, 2] = Field(
        default=2, description="2 schedules the next step while the device runs this one."
    )

    def is_long(self, num_prompt_tokens: int) -> bool:
        """Tell whether a prompt belongs to the lane of the very long ones."""
        return self.long_request_tokens is not None and num_prompt_tokens > self.long_request_tokens

    @property
    def max_waiting_tokens(self) -> int:
        """Prompt tokens read ahead, whatever the number of requests; the next steps never lack any."""
        return max(_TOKENS_OF_WAITING * self.max_waiting_requests, 2 * self.max_num_batched_tokens)

    @model_validator(mode="after")
    def _room_for_every_running_request(self) -> "SchedulerConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"{self.max_num_seqs}; each running request needs one token a step"
            )
        if (self.long_request_tokens is None) != (self.max_long_requests is None):
            raise ValueError("long_request_tokens and max_long_requests go together; set both")
        return self


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in one KV block; left out, 128 on an NPU and 16 elsewhere.",
    )
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks; left out, they are counted from free memory."
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory for the KV cache in GiB, on each device; left out, see memory_fraction.",
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
    now: datetime | None = Field(
        default=None,
        description="The moment whose date a template writes (strftime_now), the same in every row; "
        "left out, that of the job's creation, or of the engine's start where there is no job.",
    )
    system_role: Literal["error", "fold", "drop"] = Field(
        default="error",
        description="What happens to a system message where the template refuses it or leaves it "
        "out: error fails the row, fold puts its text before that of the next user message, drop "
        "takes it out.",
    )

    @property
    def template_path(self) -> Path | None:
        """The file that chat_template names, when it is not a template itself."""
        template = self.chat_template
        is_inline = template is None or "{" in template or "\n" in template
        return None if template is None or is_inline else Path(template)


def _leave_mock_out_of_forms(schema: dict[str, Any]) -> None:
    """Have what only tests set checked like the other settings, but not shown among them."""
    fields = schema["properties"]
    mock = [name for name in fields if name.startswith("mock_")]
    schema["patternProperties"] = {f"^{name}$": fields.pop(name) for name in mock}


class RuntimeConfig(Section):
    """Processes, time-outs, and where things are run."""

    model_config = ConfigDict(json_schema_extra=_leave_mock_out_of_forms)

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
        description="CPU threads of an engine, shared out among its workers; left out, the cores "
        "of this process.",
    )
    mock_max_step_tokens: int | None = Field(
        default=None, ge=1, description="The mock device has no memory for larger steps."
    )
    mock_step_seconds: float = Field(
        default=0.0, ge=0, description="What one step of the mock device takes."
    )
    mock_crash_text: str | None = Field(
        default=None,
        min_length=1,
        description="For tests of recovery: a row whose prompt contains this text kills the mock's "
        "worker process.",
    )
    mock_device_lost_after_steps: int | None = Field(
        default=None,
        ge=0,
        description="For tests of recovery: each mock worker loses its device after so many steps.",
    )

    profile_steps: tuple[NonNegativeInt, Annotated[int, Field(ge=1, le=64)]] | None = Field(
        default=None,
        description="[start, count]: each worker writes a trace of its steps from number start on. "
        "It is in memory until it is written, so there are at most 64; the mock has none.",
    )
    profile_dir: Path | None = Field(
        default=None,
        description="Where traces go; the folder profile beside log_dir when left out.",
    )

    @model_validator(mode="after")
    def _only_a_worker_may_crash(self) -> "RuntimeConfig":
        if self.inline and self.mock_crash_text is not None:
            raise ValueError(
                "mock_crash_text kills the process that runs the worker, which with inline is this "
                "one; set inline to false"
            )
        return self


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
    device_ids: tuple[NonNegativeInt, ...] = Field(
        default=(0,),
        min_length=1,
        json_schema_extra={"uniqueItems": True},
        description="Logical devices that engines may use.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto takes the dtype that the checkpoint was saved in."
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Devices that share one model; on the CPU, workers that share its cores.",
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        json_schema_extra={"maximum": 1},
        description="Only 1: layers are not split over devices.",
    )
    deterministic: bool = Field(
        default=False,
        description="Make every answer the same to the last bit, whatever the batch, the order, "
        "the chunks, preemption and the prefix cache; on the cpu only, and somewhat slower.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and answer together; the model's own limit when left out.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch every kernel of a decode step anew, also where the device could replay "
        "a captured graph.",
    )
    generation_config: Literal["model", "ignore"] = Field(
        default="model",
        description="model takes sampling defaults from the model's generation_config.json, as vLLM does.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model."
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Where compiled kernels are kept; who writes there can run code in a worker.",
    )
    log_dir: Path | None = Field(
        default=None, description="Where worker logs go; a temporary folder when left out."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe lines of the log that are kept and shown."
    )
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    @field_validator("pipeline_parallel_size")
    @classmethod
    def _no_pipeline(cls, size: int) -> int:
        if size > 1:
            raise ValueError(
                f"{size} is not possible: tokenmill does not split layers over devices; use "
                "tensor_parallel_size"
            )
        return size

    @model_validator(mode="after")
    def _rows_can_be_exact(self) -> "EngineConfig":
        if self.deterministic and self.device not in ("auto", "cpu", "mock"):
            raise ValueError(
                f"deterministic is true, but on device {self.device} the last bits of a row depend "
                "on the rows beside it; set device to cpu, or deterministic to false"
            )
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ValueError(
                f"deterministic is true, but the sums of tensor_parallel_size "
                f"{self.tensor_parallel_size} are rounded otherwise than those of one worker; set "
                "tensor_parallel_size to 1, or deterministic to false"
            )
        return self

    @model_validator(mode="after")
    def _devices_fit_the_ranks(self) -> "EngineConfig":
        if len(set(self.device_ids)) != len(self.device_ids):
            raise ValueError(f"device_ids {list(self.device_ids)} names a device twice")
        if self.runtime.inline and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {self.tensor_parallel_size} takes a process for each "
                "worker; set runtime.inline to false"
            )
        if self.device == "cpu" and self.device_ids != (0,):
            raise ValueError(
                f"device_ids {list(self.device_ids)}: the cpu is one device, write [0]"
            )
        if self.device != "cpu" and len(self.device_ids) % self.tensor_parallel_size:
            raise ValueError(
                f"{len(self.device_ids)} device_ids cannot be shared out to engines of "
                f"tensor_parallel_size {self.tensor_parallel_size}; give more, or, to share the "
                "cores of the cpu, set device to cpu"
            )
        return self
