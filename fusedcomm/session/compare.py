"""Compares parameters that should be equal on all ranks, by their bits.

    1. Every rank sends a checksum of all its parameters: eight bytes. As a rule they are equal, and that is all.
    2. The checksum of each parameter: they say which differ, and on which ranks.
    3. The values of the first of these on a rank of the majority: they say how far the other ranks' are from them.

All ranks find the same.
"""

import collections
import dataclasses
import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session.checksums import checksums, local

if TYPE_CHECKING:
    from fusedcomm.session.session import Session

Named = Sequence[tuple[str, torch.Tensor]]

_CHUNK_NUMEL = 1 << 22
"""Elements whose distances are found at once."""
_STANDS_IN = -(2**63)
"""In place of a checksum: this rank's parameters are behind those of the others, as they should be."""
_MOST_SHOWN = 3
"""Parameters whose distances are found, and named."""
_WHAT = "the comparison of parameters"
CAUSES = (
    "Perhaps one rank has trained a parameter that the others have frozen, has skipped an optimizer's step, or has "
    "loaded another checkpoint; perhaps its GPU, or its build of torch, rounds differently; or its memory is faulty. "
    "Load the same checkpoint on every rank to go on with equal parameters"
)


@dataclasses.dataclass(frozen=True)
class ParameterDifference:
    """What a comparison of parameters has found. The same on every rank; ``str()`` says it."""

    ranks: tuple[int, ...]
    """Those whose parameters are not those of most ranks. All ranks if none are those of most."""
    parameters: tuple[str, ...]
    """All that differ."""
    distances: dict[str, float]
    """Of the first three parameters: the largest absolute difference of an element to that of a rank of the majority,
    or of rank 0 without one. Inf if one of the two is not finite, or if their shapes or dtypes differ."""
    text: str

    def __str__(self) -> str:
        return self.text


def outvoted(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks whose value is not that of most ranks; all if no value is that of most. Empty if all are equal."""
    (value, count), *others = collections.Counter(values).most_common()
    has_most = not others or others[0][1] < count
    return tuple(rank for rank, each in enumerate(values) if not has_most or each != value)


def text_of_ranks(ranks: Sequence[int], num_ranks: int) -> str:
    """Whose parameters differ."""
    if len(ranks) == num_ranks:
        return f"the parameters of the {num_ranks} ranks differ, and none are those of most"
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"the parameters of {named} are not those of most ranks"


def _gathered(session: "Session", numbers: torch.Tensor) -> torch.Tensor:
    """Every rank's int64 [n], on a CPU: [ranks, n]. A collective call."""
    assert session.synchronizer is not None  # a session that has none raises where it is made
    return session.synchronizer.gather(numbers, _WHAT)


class Comparison:
    """Compares the parameters of a session.

    Args:
        named: parameters, with their names, the same on every rank. Those that have no memory are left out.
    """

    def __init__(self, session: "Session", named: Named) -> None:
        self._session = weakref.ref(session)
        self.named = [(name, tensor) for name, tensor in named if not tensor.is_meta]
        self._has_differed = False

    def when_due(self) -> None:
        """The engine calls it every `compare_every` steps. Once parameters differ, they will: only the first time is
        told."""
        if not self._has_differed:
            # A rank without data, as under Join, takes part in the others' backward passes and not in their steps.
            stands_in = torch._C._current_graph_task_id() == -1
            self._has_differed = self.now(stands_in) is not None

    def now(self, stands_in: bool = False) -> ParameterDifference | None:
        """See :meth:`fusedcomm.session.handle.CommHandle.compare_parameters`.

        stands_in: whether this rank has missed the others' steps. Then nothing is compared on any rank.
        """
        session = self._session()
        if session is None or session.world_size == 1:
            return None
        sums = checksums([tensor for _, tensor in self.named], session.device)
        own = checksums([sums], session.device)
        values = _gathered(session, own.fill_(_STANDS_IN) if stands_in else own)[:, 0].tolist()
        ranks = () if _STANDS_IN in values else outvoted(values)
        if not ranks:
            return None
        found = self._difference(session, sums, ranks)
        if session.config.compare == "raise":
            raise RuntimeError(found.text)
        if session.rank == 0:
            warn_alone(found.text, stacklevel=4)
        return found

    def _difference(self, session: "Session", sums: torch.Tensor, ranks: tuple[int, ...]) -> ParameterDifference:
        assert session.synchronizer is not None
        reference = next((rank for rank in range(session.world_size) if rank not in ranks), 0)
        of_all = _gathered(session, sums)
        differing = (of_all != of_all[reference]).any(dim=0).nonzero().flatten().tolist()
        shown = {
            self.named[i][0]: self._distances(session, self.named[i][1], reference) for i in differing[:_MOST_SHOWN]
        }
        parts = [
            f"{name} (rank {each.index(max(each))} is up to {max(each):.3g} from rank {reference})"
            for name, each in shown.items()
        ]
        more = f" and {len(differing) - len(parts)} more" if len(differing) > len(parts) else ""
        text = (
            f"fusedcomm: ahead of step {session.synchronizer.step} {text_of_ranks(ranks, session.world_size)}: "
            f"{', '.join(parts)}{more}. {CAUSES}"
        )
        names = tuple(self.named[i][0] for i in differing)
        return ParameterDifference(ranks, names, {name: max(each) for name, each in shown.items()}, text)

    def _distances(self, session: "Session", tensor: torch.Tensor, reference: int) -> list[float]:
        """By rank, how far its elements are at most from those of rank `reference`. A collective call."""
        own = local(tensor).to(session.device)
        kind = torch.tensor([zlib.crc32(f"{own.dtype} {list(tensor.shape)}".encode())], dtype=torch.int64)
        if len(_gathered(session, kind).unique(dim=0)) > 1:
            return [float("inf")] * session.world_size
        theirs = own.clone()
        session.call(lambda: dist.broadcast(theirs, group=session.process_group, group_src=reference), _WHAT)
        distance = torch.zeros((), dtype=torch.float64, device=own.device)
        for a, b in zip(own.split(_CHUNK_NUMEL), theirs.split(_CHUNK_NUMEL), strict=True):
            apart = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            distance = torch.maximum(distance, apart.max())
        return _gathered(session, distance.view(1).view(torch.int64)).view(torch.float64).flatten().tolist()
