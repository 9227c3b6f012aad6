"""What stands in for a session where torch sums gradients: the ranks' agreement, and a state that is only kept."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fusedcomm import env
from fusedcomm.config import OFF, Config, LocalOptions, choose_stall_after
from fusedcomm.ranks import agreement, groups
from fusedcomm.ranks.peers import Peers, private_store
from fusedcomm.session.parameters import NamedParameter, trainable
from fusedcomm.session.plan import Plan, predicted_rows
from fusedcomm.session.runs import Runs
from fusedcomm.session.stats import NonFinite, Stats


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
    store = private_store(group, timeout)
    peers = Peers(group, store, timeout, choose_stall_after(local.stall_after, timeout.total_seconds()))
    peers.doing("attaching: comparing its configuration with the others'")
    agreement.agree(peers, store.under("plan"), record, problem)
    peers.doing("in training, with config='off'")


@contextlib.contextmanager
def told(group: groups.Group | None) -> Iterator[None]:
    """Context of checks that may fail on this rank alone, before it attaches: an error is raised once the other ranks,
    which attach to the group, have been told. None: there are no others to tell."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if group is not None:
            agree_on_off(group, torch.device("cpu"), LocalOptions(), error)
        raise


class KeptState:
    """A synchronizer's state where there is none: what was loaded, so that steps go on to be counted later."""

    def __init__(self) -> None:
        self.step = 0
        self._nonfinite: dict[str, int] = {}

    def nonfinite_by_parameter(self) -> dict[str, int]:
        """The counts that were loaded."""
        return dict(self._nonfinite)

    def restore_nonfinite(self, counts: dict[str, int]) -> None:
        """Keeps the counts."""
        self._nonfinite = dict(counts)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Empty."""
        return {}

    def residuals_of_encoders(self) -> dict[str, tuple]:
        """Empty."""
        return {}

    def restore_residuals(self, residuals: dict[str, torch.Tensor], *, of_encoders: dict[str, tuple]) -> None:
        """Nothing: a state with residuals has been refused."""


class OffSession(Runs):
    """Stands for a :class:`Session` where torch sums: no hook, no engine, no connections. Arguments as for Session."""

    is_off, uses_engine, keeps_residuals = True, False, False
    config = Config("fp32", "exact", hosts=None)
    """Describes DDP's own all-reduce, for the plan."""

    def __init__(
        self,
        process_group: groups.Group,
        parameters: list[NamedParameter],
        local: LocalOptions,
        device: torch.device,
    ) -> None:
        agree_on_off(process_group, device, local, None)
        self.process_group, self.parameters, self.device = process_group, parameters, device
        self.synchronizer = KeptState()

    @property
    def session(self) -> "OffSession":
        """This object."""
        return self

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The group's number of ranks."""
        return self.process_group.size()

    def stats(self) -> Stats:
        """All counts are 0, because nothing is counted; `off` is True."""
        return Stats(off=True)

    def plan(self, bucket_nbytes_caps: list[int] | None, off: bool = True) -> Plan:
        """As :meth:`Session.plan`."""
        now, caps = trainable(self.parameters), bucket_nbytes_caps
        return Plan(
            config=self.config,
            world_size=self.world_size,
            device_type=self.device.type,
            codec="none",
            scratch_nbytes=0,
            exempt=(),
            buckets=() if caps is None else predicted_rows(None, self.world_size, None, now, caps),
            predicted=True,
            off=True,
            ranks_on_host=env.local_world_size(),
            frozen=not now,
        )

    def nonfinite_report(self) -> list[NonFinite]:
        """Empty, because nothing is counted."""
        return []

    def compare_parameters(self) -> None:
        """Raises RuntimeError: no engine runs that could."""
        raise RuntimeError(
            "fusedcomm: with config='off' no engine runs that could compare parameters: attach with "
            "Config('fp32', compare_every=…)"
        )

    def stop(self, reason: str) -> None:
        """Nothing: no engine runs."""
