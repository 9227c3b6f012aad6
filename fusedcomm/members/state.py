"""The state that a process which joins gets from the members: each sends a part of the bytes."""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.members.control import ControlPlane
from fusedcomm.members.errors import MemberLostError
from fusedcomm.members.packed import pack, unpack
from fusedcomm.members.view import Member
from fusedcomm.session.session import Session

KIND = "state"
"""The kind of request. Its header names the object, the step and the bytes: [begin, end) of all tensors' bytes, one
after another; without them the answer is what surrounds the tensors; see packed.py."""


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the elements of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ranges(tensors: Sequence[torch.Tensor], begin: int, end: int) -> list[memoryview]:
    """The bytes [begin, end) of all tensors' elements, one after another, in the order of each tensor's indices.

    Those of contiguous CPU tensors are views of their memory.
    """
    found, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        first, last = max(begin - at, 0), min(end - at, nbytes)
        if first < last:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            found.append(memoryview(flat[first:last].cpu().numpy()))
        at += nbytes
    return found


def fill(tensors: Sequence[torch.Tensor], content: torch.Tensor) -> None:
    """Writes the bytes of :func:`ranges`, all of them, to the tensors. content: uint8 [nbytes_of(tensors)] on CPU."""
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            values = content[at : at + nbytes].clone().view(tensor.dtype).view(tensor.shape)
            tensor.copy_(values)
            at += nbytes


def everybodys(value: Any, session: Session, call: str) -> Iterator[Any]:
    """Every rank's `value`, in rank order; what it may have, packed.py says. A collective call, if all of it is read.
    Nothing that a rank sends can run code here. `call`: the user's call that needs them, for reports.

    Raises TypeError, with the same text on every rank, if a rank's `value` has something else."""
    packed, problem = b"", ""
    tensors: list[torch.Tensor] = []
    try:
        packed, tensors = pack(value, f"rank {session.rank}'s part of {call}")
    except TypeError as error:
        problem = str(error)
    with session.calling(call):
        told = session.gather("values", {"packed": packed.decode(), "problem": problem}, call)
        for theirs in told:
            if theirs["problem"]:
                raise TypeError(theirs["problem"])
        for rank, of_rank in enumerate(told):
            theirs, empty = unpack(of_rank["packed"].encode())
            content = torch.empty(nbytes_of(empty), dtype=torch.uint8, device=session.device)
            if len(content):
                if rank == session.rank:
                    own = bytearray().join(ranges(tensors, 0, len(content)))
                    content.copy_(torch.frombuffer(own, dtype=torch.uint8))
                dist.broadcast(content, group=session.process_group, group_src=rank)
                fill(empty, content.cpu())
            yield theirs


class Transfer:
    """Fetches one object from several members at once.

    Args:
        sources: the members that have it.
        header: what every request says: the object's name and the step.
    """

    def __init__(self, plane: ControlPlane, sources: Sequence[Member], header: dict[str, object]) -> None:
        self._plane, self._sources, self._header = plane, sources, header

    def skeleton(self) -> tuple[dict, bytes]:
        """(The answer's header, the object without its tensors.)"""
        header, content = self._ask(0, {}, None)
        return header, bytes(content)

    def content(self, nbytes: int, num_parts: int) -> torch.Tensor:
        """uint8 [nbytes]: the bytes of all tensors, so many parts of them from as many members."""
        content = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(content.numpy())
        cuts = [nbytes * part // num_parts for part in range(num_parts + 1)]

        def fetch(part: int) -> None:
            begin, end = cuts[part], cuts[part + 1]
            if begin < end:
                self._ask(part, {"begin": begin, "end": end}, view[begin:end])

        with concurrent.futures.ThreadPoolExecutor(num_parts, "fc-members-state") as threads:
            list(threads.map(fetch, range(num_parts)))
        return content

    def _ask(self, first: int, more: dict[str, object], into: memoryview | None) -> tuple[dict, memoryview]:
        """Asks member `first`, and the next ones if it is lost. Raises MemberLostError if all are."""
        lost: MemberLostError | None = None
        for i in range(len(self._sources)):
            member = self._sources[(first + i) % len(self._sources)]
            try:
                return self._plane.request(member, KIND, {**self._header, **more}, into)
            except MemberLostError as error:
                lost = error
        raise lost or MemberLostError("fusedcomm: no member has the state")


def serve(
    find: Callable[[dict], tuple[dict[str, object], Any]],
) -> Callable[[dict], tuple[dict, list[memoryview]]]:
    """The handler of requests. find(header): (what the answer says, the object); raises LookupError to refuse."""

    def answer(header: dict) -> tuple[dict, list[memoryview]]:
        said, value = find(header)
        skeleton, tensors = pack(value, f"the state of {header['name']!r}")
        if "begin" not in header:
            return {**said, "nbytes": nbytes_of(tensors)}, [memoryview(skeleton)]
        return said, ranges(tensors, int(header["begin"]), int(header["end"]))

    return answer
