"""The state that a process which joins gets from the members: each sends a part of the bytes."""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.members.errors import MemberLostError
from fusedcomm.members.plane.control import ControlPlane
from fusedcomm.members.plane.view import Member
from fusedcomm.ranks.objects import nbytes_of, pack, ranges

KIND = "state"
"""The kind of request. Its header names the object, the step and the bytes: [begin, end) of all tensors' bytes, one
after another; without them the answer is what surrounds the tensors; see ranks/objects.py."""


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
