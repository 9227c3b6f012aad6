"""Checksums of tensors by their bits: one that ranks compare, and a quick one of what a rank itself has seen before."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

_CHUNK_NUMEL, _CHUNK_NUMEL_ON_CPU = 1 << 22, 1 << 16
"""Elements that are multiplied at once. On a CPU they stay in its cache, so memory is read once."""
_WORDS = {1: torch.int8, 2: torch.int16}
"""By bytes of an element; longer ones are several int32. In these a sum of 64 bits loses no element's bit."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter, in one dimension of real numbers."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)


def checksums(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64 [number of tensors] on `device`: of each tensor the sum of its words, times 1, 3, 5, … modulo 2^64. One
    changed element, and two in each other's place, change it."""
    weights: dict[torch.device, torch.Tensor] = {}

    def checksum(flat: torch.Tensor) -> torch.Tensor:
        words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
        numel = _CHUNK_NUMEL_ON_CPU if words.device.type == "cpu" else _CHUNK_NUMEL
        if words.device not in weights:
            weights[words.device] = torch.arange(1, 2 * numel, 2, dtype=torch.int64, device=words.device)
        odd = weights[words.device]
        sums = torch.stack([(chunk * odd[: chunk.numel()]).sum() for chunk in words.split(numel)])
        return sums[0] if sums.numel() == 1 else checksum(sums)

    with torch.no_grad():
        found = [checksum(local(tensor)).to(device) for tensor in tensors]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def quick(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [] where the tensor is: the sum of its bits, 64 at a time, in the order of memory. A fifth of the time of
    checksums(); two words in each other's place do not change it."""
    flat = in_memory_order(tensor) if is_dense(tensor) else tensor.detach().flatten()
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    whole = flat.numel() // per_word * per_word
    return flat[:whole].view(torch.int64).sum() + flat[whole:].view(_WORDS.get(flat.element_size(), torch.int32)).sum()


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view [numel] of a dense tensor, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a run of memory, in any order."""
    numel = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size == 1:
            continue
        if stride != numel:
            return False
        numel *= size
    return True
