"""What a kernel's documentation asks for. A device may compute rubbish where this raises."""

import torch


class ContractError(RuntimeError):
    """A kernel was called as its documentation forbids."""


def require(condition: object, found: str) -> None:
    if not condition:
        raise ContractError(found)


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...] | None = None,
) -> None:
    """Raise unless the tensor is contiguous, of one of the dtypes, and of the shape; None is any."""
    require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, wanted one of {dtypes}")
    require(tensor.is_contiguous(), f"{name} is not contiguous: strides {tensor.stride()}")
    if shape is not None:
        is_alike = len(shape) == tensor.dim() and all(
            wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
        )
        require(is_alike, f"{name} is {tuple(tensor.shape)}, wanted {shape}")


def require_absent(**values: object) -> None:
    """Raise when something is asked for that the reference kernel does not compute."""
    asked = [name for name, value in values.items() if value not in (None, 0, False)]
    require(not asked, f"the reference kernel does not know {', '.join(asked)}")
