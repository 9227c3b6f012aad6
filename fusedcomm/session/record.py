"""What the ranks of a session compare before they connect."""

from typing import TYPE_CHECKING

from fusedcomm.config import AUTO
from fusedcomm.ranks import agreement

if TYPE_CHECKING:
    from fusedcomm.session.session import Session


def record_of(session: "Session", also_agree: dict[str, object]) -> dict[str, object]:
    """What must be equal on all ranks, `also_agree` included. Causes stand before what follows from them.

    LocalOptions may differ: the bytes do not depend on them.
    """
    searched = {AUTO: also_agree[AUTO]} if AUTO in also_agree else {}
    record = {
        **agreement.versions(),
        "device": session.device.type,
        "world size": session.world_size,
        "wire": AUTO if searched else session.config.wire,
        **searched,
        "config": session.config.record(),
        **also_agree,
    }
    if session.parameters is not None:
        record["parameters"] = {
            "count": len(session.parameters),
            "list": [[p.name, list(p.tensor.shape), str(p.tensor.dtype), p.wire] for p in session.parameters],
        }
    return record
