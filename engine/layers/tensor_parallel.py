"""Splits a model of transformers over the ranks of a group, by the model's own plan.

A plan names a style for modules and parameters, such as `layers.*.mlp.down_proj: rowwise`. Each
style says which part of a weight a rank keeps, and what the ranks exchange after the module has
run. A style that is not handled here is refused by name.

Attention is split by whole heads; a key-value head is kept by several ranks when there are fewer
heads than ranks. Where a size does not divide, the first ranks keep one more, in every style, so
that a colwise layer fits the rowwise layer behind it.

A layer that computes with the weights of a split module, instead of calling the module, must
exchange for itself.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from engine.errors import ConfigError
from engine.layers import exchanges
from engine.layers.slices import (
    Range,
    Slice,
    can_share_heads,
    packed_ranges,
    range_of,
    range_of_heads,
)
from engine.parallel import ParallelGroup

logger = logging.getLogger(__name__)
# Styles that change nothing when there is no gradient, and nothing is a DTensor.
_REPLICATED = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
# The child by which an attention module is known, and by which its heads are split.
_KEY_PROJECTIONS = ("k_proj", "kv_b_proj", "query_key_value", "qkv_proj")
_QUERY_PROJECTIONS = ("q_proj", "q_b_proj", "query_key_value")
_MOSTLY_WHOLE = 0.9
# Rows of an expert's weights begin at multiples of this, or grouped_mm refuses them.
_ROW_BYTES = 16


def check_plan(config: Any, path: Path) -> None:
    """Refuse what cannot be split, from the model's configuration alone.

    Raises:
        ConfigError: the model has no plan, or a style in it is not handled.
    """
    plan: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    if not plan:
        _refuse(path, f"transformers has no tensor-parallel plan for {config.model_type} models")
    _check_styles(plan.values(), path)


def split_model(model: Any, group: ParallelGroup, path: Path) -> None:
    """Keep this rank's part of every weight that the model's plan splits, in place.

    Raises:
        ConfigError: a style of the plan is not handled, or does not fit the number of ranks.
    """
    if group.world_size > 1:
        _Splitter(model, group, path).run()


def _check_styles(styles: Iterable[str], path: Path) -> None:
    known = {*_MODULE_STYLES, *_REPLICATED}
    unknown = sorted({style for style in styles if style not in known})
    if unknown:
        _refuse(path, f"its tensor-parallel plan uses {', '.join(unknown)}, unknown to tokenmill")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigError(f"{path}: {reason}; set engine.tensor_parallel_size to 1")


class _Splitter:
    """One pass over one model. The styles are its methods, see _MODULE_STYLES."""

    def __init__(self, model: Any, group: ParallelGroup, path: Path) -> None:
        self.group = group
        self._model = model
        self._path = path
        self._config = model.config.get_text_config()
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._plan: dict[str, str] = model.tp_plan
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._heads = {
            name: self._count_heads(module)
            for name, module in self._modules.items()
            if any(hasattr(module, projection) for projection in _KEY_PROJECTIONS)
        }
        self._tied = {key for key, count in uses.items() if count > 1}
        # The original is kept beside its part: an id is of use only while the object lives.
        self._parts_of_tied: dict[tuple[int, Slice], tuple[nn.Parameter, nn.Parameter]] = {}

    def run(self) -> None:
        """Split everything, then log how much of the model this rank holds."""
        if not self._plan:
            self.refuse(f"{type(self._model).__name__} has no tensor-parallel plan")
        _check_styles(self._plan.values(), self._path)
        num_whole = _count(self._model)
        for name, module in self._modules.items():
            self._split_parameters(module, name)
            style = self._style_of(name)
            if style is not None and style not in _REPLICATED:
                _MODULE_STYLES[style](self, module, name)
        self._log_share(num_whole)

    def refuse(self, reason: str) -> NoReturn:
        """Raise the ConfigError of a model that cannot be split."""
        _refuse(self._path, reason)

    # Styles of modules.

    def colwise(self, module: Any, name: str) -> None:
        """Keep some of the outputs, which stay on this rank."""
        self._check_type(module, name, nn.Linear)
        kept = Slice(dim=0, ranges=(self._output_range(module, name),))
        self._keep(module, "weight", kept)
        self._keep(module, "bias", kept)
        if name.rpartition(".")[2] in _QUERY_PROJECTIONS:
            self._set_local_heads(name.rpartition(".")[0])

    def colwise_gather_output(self, module: Any, name: str) -> None:
        """Keep some of the outputs; every rank gets all of them after the module has run."""
        self._check_type(module, name, nn.Linear)
        size, count = module.weight.shape[0], self.group.world_size
        ranges = [range_of(size, rank, count) for rank in range(count)]
        kept = Slice(dim=0, ranges=(ranges[self.group.rank],))
        self._keep(module, "weight", kept)
        self._keep(module, "bias", kept)
        sizes = [end - start for start, end in ranges]
        module.register_forward_hook(partial(exchanges.gather_outputs, self.group, sizes))

    def packed_colwise(self, module: Any, name: str) -> None:
        """Keep some of the outputs of each packed half."""
        self._check_type(module, name, nn.Linear)
        ranges = packed_ranges(module.weight.shape[0], self.group.rank, self.group.world_size)
        self._keep(module, "weight", Slice(dim=0, ranges=ranges))
        self._keep(module, "bias", Slice(dim=0, ranges=ranges))

    def rowwise(self, module: Any, name: str) -> None:
        """Keep the weights of the inputs that this rank has; the outputs are summed."""
        self._check_type(module, name, nn.Linear)
        self._keep(module, "weight", Slice(dim=1, ranges=(self._range(module.weight.shape[1]),)))
        if self.group.rank > 0:  # the sum holds the bias of rank 0, once
            module.register_parameter("bias", None)
        module.register_forward_hook(partial(exchanges.sum_outputs, self.group))

    def rowwise_split_input(self, module: Any, name: str) -> None:
        """Take this rank's part of an input that every rank has whole, then as rowwise."""
        self._check_type(module, name, nn.Linear)
        kept = self._range(module.weight.shape[1])
        module.register_forward_pre_hook(partial(exchanges.narrow_input, kept))
        self.rowwise(module, name)

    def embedding_rowwise(self, module: Any, name: str) -> None:
        """Keep some rows of the vocabulary; rows of others count as zeros, and ranks are summed."""
        self._check_type(module, name, nn.Embedding)
        kept = self._range(module.num_embeddings)
        self._keep(module, "weight", Slice(dim=0, ranges=(kept,)))
        module.padding_idx = None  # it counts rows of the whole vocabulary
        look_up: Any = partial(exchanges.look_up, self.group, module.forward, kept)
        module.forward = look_up

    def moe_tp_experts(self, module: Any, name: str) -> None:
        """Sum the outputs of experts, of each of which a rank has a part."""
        if not getattr(module, "is_concatenated", True) or getattr(module, "is_transposed", False):
            self.refuse(f"the experts of {name} are not laid out as a split would need it")
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.stride(-2) * parameter.itemsize % _ROW_BYTES:
                self.refuse(
                    f"{name}.{own_name} falls into rows of {parameter.shape[-1]} numbers, which "
                    f"torch.nn.functional.grouped_mm does not take"
                )
        module.register_forward_hook(partial(exchanges.sum_outputs, self.group))

    # What the styles share.

    def _split_parameters(self, module: Any, name: str) -> None:
        """Split what the plan names itself: weights of experts, and numbers one for each head."""
        is_experts = self._style_of(name) == "moe_tp_experts"
        for own_name, parameter in [*module.named_parameters(recurse=False)]:
            full_name = f"{name}.{own_name}"
            style, last = self._style_of(full_name), parameter.ndim - 1
            # Outputs are the last dimension but one, as in a linear layer.
            outputs = max(last - 1, 0)
            if style == "colwise":
                ranges: tuple[Range, ...] = (self._range(parameter.shape[outputs]),)
                self._keep(module, own_name, Slice(dim=outputs, ranges=ranges))
            elif style == "packed_colwise":
                group = self.group
                ranges = packed_ranges(parameter.shape[outputs], group.rank, group.world_size)
                self._keep(module, own_name, Slice(dim=outputs, ranges=ranges))
            elif style == "rowwise" and last > 0:
                self._keep(
                    module, own_name, Slice(dim=last, ranges=(self._range(parameter.shape[last]),))
                )
            elif style not in _REPLICATED and (style is not None or is_experts):
                self.refuse(f"its plan does not say how to split {full_name}")

    def _keep(self, module: Any, name: str, part: Slice) -> None:
        parameter = module._parameters.get(name)
        if parameter is None:
            return
        key = (id(parameter), part)
        if key in self._parts_of_tied:
            module._parameters[name] = self._parts_of_tied[key][1]
            return
        kept = nn.Parameter(part.of(parameter.data), requires_grad=False)
        if id(parameter) in self._tied:
            self._parts_of_tied[key] = (parameter, kept)
        module._parameters[name] = kept

    def _range(self, size: int) -> Range:
        return range_of(size, self.group.rank, self.group.world_size)

    def _output_range(self, module: Any, name: str) -> Range:
        """Return the outputs that this rank keeps: whole heads, if these are heads."""
        size, (rank, count) = module.weight.shape[0], (self.group.rank, self.group.world_size)
        parent, _, leaf = name.rpartition(".")
        if parent not in self._heads:
            return range_of(size, rank, count)
        num_heads, num_kv_heads = self._heads[parent]
        if leaf == "qkv_proj" or (leaf == "query_key_value" and num_heads != num_kv_heads):
            self.refuse(f"queries, keys and values are packed in {name}")
        heads = num_kv_heads if leaf in ("k_proj", "v_proj") else num_heads
        if size % heads or not can_share_heads(num_heads, heads, count):
            self.refuse(f"the {heads} heads of {name} cannot be shared out to {count} ranks")
        return range_of_heads(size, heads, rank, count)

    def _count_heads(self, attention: Any) -> tuple[int, int]:
        """Return a layer's query and key-value heads; it may have others than the model names."""
        num_heads: int = self._config.num_attention_heads
        num_kv_heads: int = getattr(self._config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
        if head_dim and hasattr(attention, "q_proj") and hasattr(attention, "k_proj"):
            num_kv_heads = attention.k_proj.weight.shape[0] // head_dim
        elif head_dim and hasattr(attention, "query_key_value"):
            num_packed = attention.query_key_value.weight.shape[0] // head_dim
            num_kv_heads = (num_packed - num_heads) // 2
        return num_heads, num_kv_heads

    def _set_local_heads(self, name: str) -> None:
        """Let an attention module whose heads are split count its own only."""
        attention, (num_heads, num_kv_heads) = self._modules[name], self._heads[name]
        heads = num_heads // self.group.world_size
        kv_heads = max(1, num_kv_heads // self.group.world_size)
        counts = {
            "num_heads": heads,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_key_value_groups": heads // kv_heads,
        }
        for attribute, count in counts.items():
            if hasattr(attention, attribute):
                setattr(attention, attribute, count)

    def _style_of(self, name: str) -> str | None:
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def _check_type(self, module: Any, name: str, wanted: type[nn.Module]) -> None:
        if not isinstance(module, wanted):
            self.refuse(f"{name} is a {type(module).__name__}, its plan wants a {wanted.__name__}")

    def _log_share(self, num_whole: int) -> None:
        rank, count, num_kept = self.group.rank, self.group.world_size, _count(self._model)
        logger.info(
            "split rank=%d world_size=%d: holds %d of %d weights", rank, count, num_kept, num_whole
        )
        if num_kept > _MOSTLY_WHOLE * num_whole:
            logger.warning(
                "the plan of %s splits little: each rank holds %.0f%% of the weights",
                type(self._model).__name__,
                100 * num_kept / num_whole,
            )


_MODULE_STYLES: dict[str, Callable[[_Splitter, Any, str], None]] = {
    "colwise": _Splitter.colwise,
    "colwise_gather_output": _Splitter.colwise_gather_output,
    "colwise_rep": _Splitter.colwise_gather_output,
    "packed_colwise": _Splitter.packed_colwise,
    "rowwise": _Splitter.rowwise,
    "rowwise_split_input": _Splitter.rowwise_split_input,
    "rowwise_rep": _Splitter.rowwise_split_input,
    "embedding_rowwise": _Splitter.embedding_rowwise,
    "moe_tp_experts": _Splitter.moe_tp_experts,
}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
