"""One attachment's native side: channels made, ranks agreed, engine running. Shared by both ways to integrate."""

import atexit
import dataclasses
import sys
import weakref

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import agreement, config, groups, plan, stats
from fusedcomm.config import Config
from fusedcomm.native import _C

_running: "weakref.WeakSet[Session]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class NamedParameter:
    name: str
    tensor: torch.Tensor
    exempt: bool


class Session:
    """A running engine on one process group.

    Args:
        process_group: the group that DDP uses; every rank of it makes a Session at the same time.
        parameters: what DDP synchronises, or None if it is not known; then parameters are recognised by their shapes.

    Raises:
        RuntimeError: no path for the group's backend, or the ranks do not agree (the same text on every rank).
    """

    def __init__(
        self,
        cfg: Config,
        process_group: dist.ProcessGroup,
        parameters: list[NamedParameter] | None,
        isa: str | None,
        codec_threads: int | None,
    ) -> None:
        device = torch.device("cpu")
        groups.check_backend(process_group, device)
        self.config = cfg
        self.process_group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.parameters = parameters
        # What is wrong on this rank alone is told to the others, which would wait for it otherwise.
        problem = None
        try:
            self.isa = config.choose_isa(isa)
            self.codec_threads = config.choose_codec_threads(codec_threads, self.world_size)
        except ValueError as error:
            problem = error
        store = groups.private_store(process_group)
        record = self._record() if problem is None else {agreement.PROBLEM: str(problem)}
        try:
            agreement.agree(store, self.rank, self.world_size, record, groups.group_timeout(process_group, device))
        except RuntimeError:
            if problem is not None:
                raise problem from None
            raise
        channels = groups.make_channels(process_group, device, store)
        known = parameters or []
        self.hook = _C.GradHook(
            config=cfg.native(self.world_size),
            scatter=channels.scatter,
            gather=channels.gather,
            parameters=[(p.tensor, p.name, p.exempt) for p in known],
            exempt_1d=cfg.exempt_1d,
            isa=self.isa,
            codec_threads=self.codec_threads,
        )
        self.isa = self.hook.isa
        _running.add(self)

    def _record(self) -> dict:
        """What all ranks must share. Threads and instruction set may differ: the bytes do not depend on them."""
        record = {
            "versions": {
                "fusedcomm": fusedcomm.__version__,
                "torch": torch.__version__.split("+")[0],
                "wire layout": _C.WIRE_LAYOUT_VERSION,
                "byte order": sys.byteorder,
            },
            "config": dataclasses.asdict(self.config),
            "world size": self.world_size,
        }
        if self.parameters is not None:
            record["parameters"] = {
                "count": len(self.parameters),
                "list": [[p.name, list(p.tensor.shape), str(p.tensor.dtype)] for p in self.parameters],
            }
        return record

    def stats(self) -> stats.Stats:
        return stats.collect(self.hook, self.world_size)

    def plan(self, bucket_nbytes_caps: list[int] | None) -> plan.Plan:
        """The plan by the buckets seen, or, before the first, by how DDP is expected to cut them."""
        rows = plan.actual_rows(self.config, self.world_size, self.hook)
        predicted = not rows
        if predicted and self.parameters is not None and bucket_nbytes_caps is not None:
            named = [(p.name, p.tensor) for p in self.parameters]
            rows = plan.predicted_rows(self.config, self.world_size, named, bucket_nbytes_caps)
        return plan.Plan(
            config=self.config,
            world_size=self.world_size,
            isa=self.isa,
            codec_threads=self.codec_threads,
            scratch_nbytes=self.hook.scratch_nbytes,
            exempt=tuple(p.name for p in self.parameters or [] if p.exempt),
            buckets=rows,
            predicted=predicted,
        )

    def stop(self, reason: str) -> None:
        """Ends the engine; buckets under way fail with `reason`. Idempotent."""
        self.hook.stop(reason)
        _running.discard(self)


@atexit.register
def _stop_all() -> None:
    # Worker threads must not outlive the interpreter.
    for session in list(_running):
        session.stop("the process is exiting")
