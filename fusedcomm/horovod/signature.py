"""What the ranks must agree on for one operation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusedcomm.horovod.checks import OP_NAMES, Sum, dtype_name

NO_NAME = "noname"
"""Begins the names of operations that were given none."""
ROWS_MAY_DIFFER = ("allgather", "alltoall")
"""Kinds whose ranks may give tensors that differ in their first dimension."""


def described(kind: str, tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """A signature's `tensors`, of an operation of this kind."""
    first = 1 if kind in ROWS_MAY_DIFFER else 0
    return tuple([(dtype_name(each.dtype), tuple(each.shape[first:])) for each in tensors])


class Signature(NamedTuple):
    """A rank's request: an operation by its name. A grouped operation is one request with several tensors.

    kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier" or "join".
    root: in the process set.
    device: the type of the tensors' device.
    tensors: dtype's name and shape of each; without the first dimension where that may differ.
    """

    kind: str
    name: str
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    device: str = "cpu"
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.name}"

    def nbytes(self) -> int:
        """Bytes of all tensors' elements, where their rows are the same on every rank."""
        return sum(getattr(torch, dtype).itemsize * torch.Size(shape).numel() for dtype, shape in self.tensors)

    def fuses(self) -> tuple | None:
        """Operations with the same value may share a bucket; with None they share none."""
        dtypes = {dtype for dtype, _ in self.tensors}
        if self.kind != "allreduce" or len(dtypes) != 1:
            return None
        return self.op, self.prescale, self.postscale, self.device, *dtypes

    @staticmethod
    def read(fields: list) -> "Signature":
        """From what json makes of one."""
        kind, name, op, prescale, postscale, root, device, tensors = fields
        shapes = tuple((dtype, tuple(shape)) for dtype, shape in tensors)
        return Signature(kind, name, op, prescale, postscale, root, device, shapes)

    def shapes(self, rows: Sequence[int]) -> list[list[int]]:
        """The tensors' whole shapes. `rows`: of each tensor, or of the parts of one."""
        first = [sum(rows)] if self.kind == "alltoall" else rows
        return [[*first[i : i + 1], *shape] for i, (_, shape) in enumerate(self.tensors)]


Said = tuple[Signature, int, Sequence[int]]
"""What a rank of the job has submitted: its signature, the rank, and its rows."""


def mismatch(one: Said, other: Said) -> str:
    """Why two ranks' requests of one name cannot be one operation; empty if they can."""
    (a, rank_a, rows_a), (b, rank_b, rows_b) = one, other
    compared: list[tuple[str, Any, Any]] = [
        ("number of tensors", len(a.tensors), len(b.tensors)),
        ("op", OP_NAMES[a.op], OP_NAMES[b.op]),
        ("root rank", a.root, b.root),
        ("prescale_factor", f"{a.prescale:.17g}", f"{b.prescale:.17g}"),
        ("postscale_factor", f"{a.postscale:.17g}", f"{b.postscale:.17g}"),
        ("device", a.device, b.device),
    ]
    shape = "shape past the first dimension" if a.kind in ROWS_MAY_DIFFER else "shape"
    shapes = zip(a.shapes(rows_a), b.shapes(rows_b), strict=False)
    for i, (in_a, in_b, whole) in enumerate(zip(a.tensors, b.tensors, shapes, strict=False)):
        of = f" of tensor {i}" if len(a.tensors) > 1 else ""
        compared.append(("dtype" + of, in_a[0], in_b[0]))
        if in_a[1] != in_b[1]:
            compared.append((shape + of, *whole))
    for what, in_one, in_other in compared:
        if in_one != in_other:
            return (
                f"fusedcomm: the ranks do not agree on {a.key}: its {what} is {in_one} on rank {rank_a} and {in_other} "
                f"on rank {rank_b}. Submit the same on every rank, or use another name"
            )
    return ""
