"""The agreement of ranks that leave the sums to torch."""

import contextlib

import torch
import torch.distributed as dist

from fusedcomm.config import OFF, LocalOptions, choose_stall_after
from fusedcomm.ranks import agreement, groups
from fusedcomm.ranks.peers import Peers


def agree_on_off(group: groups.Group, device: torch.device, local: LocalOptions, problem: Exception | None) -> None:
    """Returns once the ranks have agreed that all of them attach with config="off".

    Raises: `problem`, if there is one, once the other ranks have been told; and as :class:`Session`.
    """
    groups.refuse_unknown(group)
    timeout = dist.default_pg_timeout
    # As Session's record begins: a rank with a wire is told of the difference.
    record = {**agreement.versions(), "device": device.type, "world size": group.size(), "wire": OFF}
    with contextlib.suppress(RuntimeError):  # the group has no backend for the device, which torch itself reports
        timeout = groups.group_timeout(group, device)
    store = groups.private_store(group, timeout)
    peers = Peers(group, store, timeout, choose_stall_after(local.stall_after, timeout.total_seconds()))
    peers.doing("attaching: comparing its configuration with the others'")
    agreement.agree_to_attach(peers, store.under("plan"), record, problem)
    peers.doing("in training, with config='off'")
