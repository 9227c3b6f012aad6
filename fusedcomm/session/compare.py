"""Compares parameters that should be equal on all ranks, by their bits.

    1. Every rank sends a checksum of all its parameters: eight bytes. As a rule they are equal, and that is all.
    2. The checksum of each parameter: they say which differ.

All ranks find the same.
"""

import collections
import dataclasses
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session.checksums import checksums

if TYPE_CHECKING:
    from fusedcomm.session.session import Session

Named = Sequence[tuple[str, torch.Tensor]]

_STANDS_IN = -(2**63)
"""In place of a checksum: this rank's parameters are behind those of the others, as they should be."""
_MOST_SHOWN = 3
"""Parameters that are named in the text."""
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
        names = tuple(self.named[i][0] for i in differing)
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        text = (
            f"fusedcomm: ahead of step {session.synchronizer.step} {text_of_ranks(ranks, session.world_size)}: "
            f"{', '.join(names[:_MOST_SHOWN])}{more}. {CAUSES}"
        )
        return ParameterDifference(ranks, names, text)
