"""The errors with which a member stops."""

from collections.abc import Callable, Sequence

from fusedcomm.members.errors import ExpelledError, MinorityError, TooFewRanksError
from fusedcomm.members.plane.view import View

_REMEDY = "Mend the network, and start this process again as one that joins"


def _named(view: View, uids: Sequence[str], reason: Callable[[str], str]) -> str:
    return ", ".join(f"{view.rank_of(uid)} ({reason(uid) or 'nothing arrives from it'})" for uid in uids)


def minority(
    view: View, silent: Sequence[str], reason: Callable[[str], str], num_alive: int, step: int
) -> MinorityError:
    """reason: what was seen of a uid last."""
    return MinorityError(
        f"fusedcomm: the silent ranks {_named(view, silent, reason)} of view {view.number}, which has "
        f"{len(view.members)} members, may be training on, and only {num_alive} hear each other here. This process "
        f"stops in step {step}. {_REMEDY}"
    )


def may_have_begun(view: View) -> MinorityError:
    return MinorityError(
        f"fusedcomm: view {view.number} was agreed on and may have begun, and too many of its {len(view.members)} "
        f"members are silent. This process stops. {_REMEDY}"
    )


def too_few(
    view: View, lost: Sequence[str], reason: Callable[[str], str], num_alive: int, min_ranks: int
) -> TooFewRanksError:
    return TooFewRanksError(
        f"fusedcomm: {num_alive} of {len(view.members)} members of view {view.number} are left, and min_ranks is "
        f"{min_ranks}. Lost: {_named(view, lost, reason) or 'none'}. Start more processes, or lower min_ranks"
    )


def expelled(view: View, number: int, why: str) -> ExpelledError:
    """why: what this process knows of its silence; empty if nothing."""
    return ExpelledError(
        f"fusedcomm: this process, of view {view.number}, was silent to the others for longer than their `silence`"
        f"{f' ({why})' if why else ''}, and they go on without it in view {number}. Start it again as one that joins. "
        "A process is silent, too, while a call holds Python's interpreter: then give Members(silence=…) more seconds "
        "than the longest such call takes"
    )
