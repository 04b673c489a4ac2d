"""Registers the reference kernels under the schemas that the wheel has for its operations."""

import torch

from npu_simulator import attention_operations, small_operations

_FUSED_ATTENTION = "npu_fused_infer_attention_score"
_KERNELS = {
    "_npu_dtype_cast": small_operations.dtype_cast,
    "npu_fusion_attention_v3": attention_operations.for_training,
    "npu_scatter_pa_kv_cache": small_operations.scatter_pa_kv_cache,
    "npu_rms_norm": small_operations.rms_norm,
    "npu_add_rms_norm": small_operations.add_rms_norm,
    "npu_rotary_mul": small_operations.rotary_mul,
    "npu_swiglu": small_operations.swiglu,
    "npu_top_k_top_p": small_operations.top_k_top_p,
    _FUSED_ATTENTION: attention_operations.first,
    f"{_FUSED_ATTENTION}.out": attention_operations.first_out,
    f"_{_FUSED_ATTENTION}_get_max_workspace": attention_operations.first_workspace,
    f"_{_FUSED_ATTENTION}_infer_output": attention_operations.infer_output,
    f"{_FUSED_ATTENTION}_v2": attention_operations.second,
    f"{_FUSED_ATTENTION}_v2.out": attention_operations.second_out,
    f"_{_FUSED_ATTENTION}_v2_get_max_workspace": attention_operations.second_workspace,
    f"_{_FUSED_ATTENTION}_v2_infer_output": attention_operations.infer_output,
}
# The registrations last as long as this object.
_library = torch.library.Library("npu", "IMPL", "CPU")


def register() -> None:
    for name, kernel in _KERNELS.items():
        _library.impl(name, kernel)
