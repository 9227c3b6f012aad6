"""Checks of operations' arguments. Every check is local: what depends on other ranks is checked by rank 0."""

import sys
import warnings
from collections.abc import Sequence

import torch

from fusedcomm.horovod.errors import HorovodInternalError

Average, Sum, Min, Max, Product = range(5)
OP_NAMES = ("Average", "Sum", "Min", "Max", "Product")

REDUCED = frozenset((torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""Dtypes that can be reduced. The others below can only be moved."""
MOVED = REDUCED | {torch.uint8, torch.int8, torch.int16, torch.bool}


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in torch."""
    return str(dtype).removeprefix("torch.")


def check_tensor(kind: str, tensor: object, dtypes: frozenset[torch.dtype], has_rows: bool) -> torch.Tensor:
    """The tensor. Raises ValueError unless it is a dense, contiguous one of these dtypes; with has_rows, no scalar."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{kind}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise ValueError(f"{kind}: a tensor of dtype {tensor.dtype} is not possible: convert it to one of {names}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{kind}: a tensor of layout {tensor.layout} is not possible: use sparse_allreduce_async()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kind}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: pass "
            "tensor.contiguous()"
        )
    if has_rows and tensor.dim() == 0:
        raise ValueError(f"{kind}: a scalar has no first dimension: pass tensor.reshape(1)")
    return tensor


def check_group(kind: str, tensors: object, dtypes: frozenset[torch.dtype], has_rows: bool) -> list[torch.Tensor]:
    """The tensors as a list. Raises ValueError for what check_tensor() refuses and for no tensors at all, and
    HorovodInternalError if they are on several devices."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ValueError(f"grouped {kind}: expected a list of tensors, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"grouped {kind}: the list has no tensors")
    checked = [check_tensor(f"grouped {kind}", tensor, dtypes, has_rows) for tensor in tensors]
    devices = {tensor.device for tensor in checked}
    if len(devices) > 1:
        raise HorovodInternalError(f"grouped {kind}: the tensors are on several devices, {sorted(map(str, devices))}")
    return checked


def parse_op(op: int | None, average: bool | None) -> int:
    """The op; Average if neither is given. Raises ValueError if both are given, or for an unknown op."""
    if average is not None:
        if op is not None:
            raise ValueError(f"both average={average} and op={op} are given: use op=hvd.Average or op=hvd.Sum alone")
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals["__name__"].startswith("fusedcomm."):
            level, frame = level + 1, frame.f_back
        warnings.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=level)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in range(len(OP_NAMES)):
        raise ValueError(f"op={op!r} is not possible: use one of {', '.join('hvd.' + name for name in OP_NAMES)}")
    return op


def check_scattered_op(op: int) -> None:
    """Raises HorovodInternalError for an op that cannot be scattered."""
    if op not in (Average, Sum):
        name = OP_NAMES[op] if op in range(len(OP_NAMES)) else repr(op)
        raise HorovodInternalError(f"reducescatter: op={name} is not possible: use hvd.Average or hvd.Sum")


def parse_splits(splits: object, num_rows: int, size: int) -> list[int]:
    """Rows for each rank of the set. None: as many for each. Raises ValueError for what is not possible."""
    if splits is None:
        if num_rows % size:
            raise ValueError(f"alltoall: {num_rows} rows cannot be split evenly over {size} ranks: pass splits")
        return [num_rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            raise ValueError(
                f"alltoall: splits of dtype {splits.dtype} and shape {tuple(splits.shape)} are not possible: pass a "
                "list of whole numbers, or a tensor of dtype int32 with one dimension"
            )
        splits = splits.tolist()
    listed = list(splits) if isinstance(splits, Sequence) and not isinstance(splits, (str, bytes)) else None
    if listed is None or not all(isinstance(rows, int) and not isinstance(rows, bool) for rows in listed):
        raise ValueError(
            f"alltoall: splits={splits!r} is not possible: pass a list of whole numbers, or an int32 tensor"
        )
    if len(listed) != size or min(listed) < 0 or sum(listed) > num_rows:
        raise ValueError(
            f"alltoall: splits={listed} are not possible for {num_rows} rows and {size} ranks: one for each rank, none "
            "negative, and in all no more than the rows"
        )
    return listed
