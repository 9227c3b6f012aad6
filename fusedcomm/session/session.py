"""A session: the channels, the ranks' agreement and the engine of one attachment, however it was attached."""

import atexit
import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fusedcomm import chunks, trace
from fusedcomm.config import AUTO, OFF, Config, LocalOptions
from fusedcomm.devices.cpu import CpuPath
from fusedcomm.devices.cuda import CudaPath
from fusedcomm.native import _C
from fusedcomm.ranks import agreement, bounded_store, groups, own_address
from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.channels import beside_group, with_hosts
from fusedcomm.ranks.peers import Peers, warn_alone
from fusedcomm.ranks.watch import Watch
from fusedcomm.session import levels, plan
from fusedcomm.session.compare import Comparison
from fusedcomm.session.parameters import NamedParameter, grad_dtypes
from fusedcomm.session.stats import Stats, collect

T = TypeVar("T")
Mode: TypeAlias = Literal["active", "searching", "off", "ended"]
"""What gradients go through: the engine, an engine or torch in turns, torch's own sums, or nothing of fusedcomm's."""

NO_WIRE = Config("fp32", "exact", hosts=None)
"""Describes torch's own sums, for a session that is off."""

_made: "weakref.WeakSet[Session]" = weakref.WeakSet()


class Session:
    """A running engine on one process group; with `is_off` the ranks' agreement alone, and a state that is only kept.

    Args:
        process_group: the group that DDP uses, or one of fusedcomm's own; every rank of it makes a Session at the same
            time.
        parameters: the module's parameters: first those that require gradients, then those that may have required them
            when DDP was made. None: not known; parameters are then named by their shapes as they appear in buckets.
        device: where the gradients are.
        announce: whether rank 0 may print that something takes a while.
        beside: another session on the same group, whose channels, hosts and store this session uses, too. The ranks
            have already agreed there. Only one of the two sessions may have buckets under way.
        also_agree: further values (JSON-serializable) that must be equal on all ranks.
        watched: whether stalls are reported from now on; if not, from :meth:`watch` on.
        reduces_rows: whether its sums are reduce-scatters and not all-reduces.
        gathers_rows: whether it has all-gathers and no sums.
        shares_communicator: whether sums on cuda delay the group's own collectives; see `beside_group`.
        is_off: whether torch sums: no engine is made, and nothing is connected. As an attribute it may change.
        problem: the error that keeps this rank from taking part. It is raised once the other ranks have been told.

    Attributes:
        explains: whether an error waits for what the watch finds out about the other ranks.
        warms_up: whether the first collectives on an accelerator run here, so that what they find wrong is an error of
            attach.
        peers: what waits for other ranks outside of steps; a session beside another one shares it.
        host_names: of each rank.
        levels: of its sums.
        synchronizer: the engine; None with `is_off`.
        kept: without an engine, what was loaded of its state: the step, and counts of NaN and Inf by parameter.

    Raises:
        RuntimeError: fusedcomm has no path for the device over the group's backend, torch.distributed does not know the
            group, or the ranks do not agree (the same text on every rank).
        ValueError: an option does not fit the device, the machine or the ranks.
        PeerLostError: a rank is lost before it has attached.
    """

    explains = warms_up = True

    def __init__(
        self,
        cfg: Config,
        process_group: groups.Group,
        parameters: list[NamedParameter] | None,
        local: LocalOptions,
        device: torch.device,
        announce: bool = False,
        *,
        beside: "Session | None" = None,
        also_agree: Mapping[str, object] | None = None,
        watched: bool = True,
        reduces_rows: bool = False,
        gathers_rows: bool = False,
        is_off: bool = False,
        shares_communicator: bool = True,
        problem: Exception | None = None,
    ) -> None:
        self.config, self.process_group, self.parameters = cfg, process_group, parameters
        self.local, self.device = local, device
        self.is_off, self.has_engine = is_off, not is_off
        self.synchronizer: Any = None
        self.weights: Any = None
        self.kept: tuple[int, dict[str, int]] = (0, {})
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.keeps_residuals, self._reduces_rows = cfg.feedback is not None, reduces_rows
        self._announces, self._shares_communicator = announce and self.rank == 0, shares_communicator
        self._num_gathered = 0
        self._end_watch: weakref.finalize | None = None
        self._gathered: BoundedStore | None = None
        path = None
        if beside is None:
            self.peers = Peers.of(process_group, device, local.stall_after)
            self._store = self.peers.store
            path, self.host_names = self._agree(also_agree or {}, problem)
        else:
            self.peers, self.host_names, self._store = beside.peers, beside.host_names, beside.peers.part()
        self.levels = levels.find(cfg, self.host_names, self.rank, of_rows=reduces_rows or gathers_rows)
        if is_off:
            self.codec, self.s_per_byte = "none", None
            self.peers.doing("in training, with config='off'")
            return
        self.synchronizer = self._engine(path, beside)
        if cfg.weighted is not None:
            self.weights = self.synchronizer.weights
            self.weights.use(of_sums=cfg.weighted == "sum")
        self.use_comparison([(p.name, p.tensor) for p in parameters or []])
        _made.add(self)
        self.peers.doing("in training, attached")
        if watched:
            self.watch()

    def _agree(
        self, also_agree: Mapping[str, object], problem: Exception | None
    ) -> tuple["CpuPath | CudaPath | None", list[str]]:
        """Returns this rank's path, None with `is_off`, and all ranks' hosts, once the ranks have agreed."""
        self.peers.doing("attaching: comparing its configuration with the others'")
        # An error of this rank alone is published, because the other ranks would otherwise wait for this one.
        record, path = {}, None
        try:
            if problem is not None:
                raise problem
            if self.has_engine:
                if not self._reduces_rows:
                    self.config.refuse_unsharded()
                groups.check_backend(self.process_group, self.device)
                path = self._path()
            record = self._record(also_agree)
        except Exception as error:
            problem = error
        self._store.set(f"host/{self.rank}", own_address.host_name())
        agreement.agree(self.peers, self._store.under("plan"), record, problem)
        # The ranks have agreed, so each has published its host name: reading the names does not wait.
        names = self._store.multi_get([f"host/{rank}" for rank in range(self.world_size)])
        return path, [name.decode() for name in names]

    def _record(self, also_agree: Mapping[str, object]) -> dict[str, object]:
        """What must be equal on all ranks, causes before what follows from them. No bytes depend on LocalOptions."""
        record = {
            **agreement.versions(),
            "device": self.device.type,
            "world size": self.world_size,
            "wire": AUTO if AUTO in also_agree else self.config.wire if self.has_engine else OFF,
        }
        if not self.has_engine:
            return record
        record |= {"config": self.config.record(), **also_agree}
        if self.parameters is not None:
            record["parameters"] = {
                "count": len(self.parameters),
                "list": [[p.name, list(p.tensor.shape), str(p.tensor.dtype), p.wire] for p in self.parameters],
            }
        return record

    def _engine(self, path: "CpuPath | CudaPath | None", beside: "Session | None") -> "_C.Synchronizer":
        """Connects the ranks and makes the engine. Raises if any rank cannot."""
        synchronizer, problem = None, None
        try:
            self.peers.doing("attaching: connecting with the other ranks")
            transport = self._connect(path, beside)
            config, world_size = self.effective_config, self.world_size
            with chunks.fitting_memory(config, world_size, self.device.type, self.ranks_per_host):
                synchronizer = _C.Synchronizer(
                    config=self.native_config,
                    device=self.native_device,
                    transport=transport,
                    parameters=[(p.tensor, p.name, p.wire) for p in self.parameters or []],
                    wire_1d=config.wire_number_1d,
                    grad_device=self.device,
                )
        except Exception as error:
            problem = error
        found = {
            "hosts": self.levels.hosts.groups if self.levels.hosts else None,
            "chunks": dataclasses.astuple(self.effective_config.chunks) if synchronizer else None,
        }
        try:
            self.peers.doing("attaching: its engine is ready")
            agreement.ready(self.peers, self._store, found, problem)
        except Exception:
            if synchronizer is not None:  # freed now, because a caller may keep the error and with it the synchronizer
                synchronizer.stop("another rank has no engine")
                synchronizer.engine.free_workspaces()
            raise
        return synchronizer

    def _connect(self, path: "CpuPath | CudaPath | None", beside: "Session | None") -> "_C.C10dTransport":
        """Connects the ranks, as far as they are not connected `beside`."""
        on_two_levels = self.ranks_per_host > 1
        if beside is not None:
            is_shared = isinstance(beside.native_device, _C.CpuDevice) or self._kernels() == beside._kernels()
            path = None if is_shared else self._path(on_two_levels)
        elif on_two_levels and not path.has_two_levels:
            path = self._path(on_two_levels)  # its kernels for two levels, too
        if path is None:
            self.native_device, self.codec = beside.native_device, beside.codec
        else:
            self.native_device, self._transport = self._while_connecting(lambda: self._connect_path(path))
            self.s_per_byte, self.codec = path.s_per_byte, path.codec
        if beside is not None:
            self._transport, self.s_per_byte = beside._transport, beside.s_per_byte
            if self.levels.are_those_of(beside.levels):
                return beside.synchronizer.transport
        transport = self._connect_hosts() if on_two_levels else self._transport
        if self.warms_up and self.device.type != "cpu":
            try:
                self._while_connecting(lambda: transport.warm_up(self.native_device))
            except Exception:
                transport.give_up()  # a thread that is left behind enqueues no more
                raise
        return transport

    def _connect_path(self, path: "CpuPath | CudaPath") -> tuple["_C.Device", "_C.C10dTransport"]:
        group, device, store = self.process_group, self.device, bounded_store.own_client(self._store)
        if device.type == "cpu" or self._shares_communicator:
            return path.connect(group, device, store)
        native_device, transport = path.connect(beside_group(group, device, store), device, store)
        transport.own_backend()
        return native_device, transport

    def _while_connecting(self, connect: Callable[[], T]) -> T:
        """Returns what `connect` returns. Raises if another rank is lost or says that it cannot attach."""

        def on_device() -> T:  # every thread has its own current device
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                return connect()

        return agreement.connect(self.peers, self._store, on_device)

    @property
    def session(self) -> "Session":
        """This object."""
        return self

    def watch(self) -> None:
        """Reports stalls and explains failures from now on. Idempotent.

        A watch takes a thread and a connection to the store. Of several sessions on the same channels only the running
        one needs it.
        """
        if self.world_size == 1 or self._end_watch is not None:
            return
        try:
            store, port = self._store.under("watch"), bounded_store.store_port(self.process_group)
            watch = Watch(self.synchronizer, self.peers, store, port, self.explains)
        except RuntimeError as error:  # the system has no thread left
            self.synchronizer.unwatch()
            warn_alone(f"fusedcomm: stalls will not be reported: {error}", stacklevel=6)
            return
        self._end_watch = weakref.finalize(self, watch.end)  # a session may be dropped without stop()

    def unwatch(self) -> None:
        """Ends what :meth:`watch` began. Idempotent."""
        if self._end_watch is not None:
            self.synchronizer.unwatch()
            self._end_watch()
            self._end_watch = None

    @property
    def mode(self) -> Mode:
        """Whether gradients go through the engine."""
        return "off" if self.is_off else "active"

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host if sums have two levels, else 1."""
        return self.levels.ranks_per_host

    def trace(self, path: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
        """See :meth:`fusedcomm.session.handle.CommHandle.trace`."""
        return trace.record(self.synchronizer, path, self.rank, self.world_size)

    @property
    def native_config(self) -> "_C.WireConfig":
        """The engine's configuration."""
        config = self.effective_config
        return config.native(config.chunks, self.ranks_per_host, self.levels.own_host)

    @property
    def effective_config(self) -> Config:
        """The configuration with the chunks that suit the link."""
        return chunks.resolved(self.config, self.world_size, self.device.type, self.s_per_byte, self.ranks_per_host)

    @property
    def through_torch(self) -> str | None:
        """See :class:`fusedcomm.session.plan.Plan`."""
        return self.synchronizer.transport.why_through_torch if self.has_engine else None

    def _connect_hosts(self) -> "_C.C10dTransport":
        """The transport with channels for both levels."""
        transport, group, device, found = self._transport, self.process_group, self.device, self.levels.hosts
        return self._while_connecting(
            lambda: with_hosts(transport, group, device, bounded_store.own_client(self._store), found)
        )

    def confirm(self, problem: Exception | None, stop: Callable[[str], object] | None = None) -> None:
        """Raises what a rank has found since its session was made, this rank's `problem` first, once `stop` was called.
        A collective call, at most one for each session."""
        agreement.confirm(self.peers, self._store, problem, stop or self.stop)

    def _path(self, two_levels: bool | None = None) -> "CpuPath | CudaPath":
        """This rank's path. two_levels: whether it is prepared for sums on two levels. None: if the configuration needs
        them, because the hosts are not known yet."""
        if self.device.type == "cpu":
            return CpuPath(self.local, self.world_size)
        return CudaPath(
            self.config,
            self.local,
            self.process_group,
            self.device,
            grad_dtypes(self.parameters, self._reduces_rows),
            self._announces,
            self.config.needs_two_levels if two_levels is None else two_levels,
            self._reduces_rows,
        )

    def store(self, name: str) -> dist.Store:
        """The part of this attachment's store that has this name."""
        return self._store.under(name).native

    def stats(self) -> Stats:
        """Counts and times of this rank. Without an engine nothing is counted."""
        counted = collect(self.synchronizer, self.world_size) if self.has_engine else Stats()
        return dataclasses.replace(counted, off=self.is_off)

    def gather(self, what: str, record: object, call: str) -> list:
        """Returns every rank's `record` (JSON-serializable), in rank order. A collective call.

        Args:
            what: names the records in the store.
            call: the user's call that needs them, for reports.
        """
        store = self._store.under(f"{what}/{self._num_gathered + 1}")
        with self.calling(call):
            everybodys = agreement.gather(self.peers, store, record, f"in {call}", self._end_watch is not None)
        self._num_gathered += 1
        # All ranks have made this call, so each has read the records of the call before, which can be removed.
        if self._gathered is not None:
            agreement.forget(self._gathered, self.rank)
        self._gathered = store
        return everybodys

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Context of a collective call between steps. Tells the other ranks and the watch that this rank takes part."""
        self.peers.doing(f"in {what}")
        call = self.synchronizer.begin_call(what)
        has_ended = False
        try:
            yield
            has_ended = True
        finally:
            self.synchronizer.end_call(call, has_ended)
            self.peers.doing(
                f"in training, after step {self.synchronizer.step - 1}" if self.synchronizer.step else "in training"
            )

    def sum_over_ranks(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Sums fp32 or float64 tensors over the ranks, in place. A collective call; `what` names it in reports."""

        def reduce() -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.process_group)

        self.call(reduce, what)

    def call(self, collective: Callable[[], object], what: str) -> None:
        """Calls a collective of torch's over the group, whose error names a rank that is lost. `what`: in reports."""
        with self.calling(what):
            if self.device.type == "cpu":
                self.peers.call(collective, f"in {what}", is_watched=self._end_watch is not None)
            else:
                collective()  # only enqueues, and does not wait

    def use_comparison(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compares these parameters every `compare_every` backward passes. Call it before the first."""
        self.comparison = comparison = Comparison(self, named)
        due = weakref.WeakMethod(comparison.when_due)  # the engine must not keep what the session keeps
        every = self.config.compare_every if comparison.named else None
        self.synchronizer.before_every(every or 0, lambda: due()())

    def plan(self, bucket_nbytes_caps: list[int] | None, off: bool | None = None) -> plan.BucketsPlan:
        """See :func:`fusedcomm.session.plan.plan_of`. off: None: as `is_off`."""
        return plan.plan_of(self, bucket_nbytes_caps, self.is_off if off is None else off)

    def say_notices(self) -> None:
        """Emits the engine's notices since the last call as warnings."""
        for text in self.synchronizer.take_notices():
            warn_alone(text, stacklevel=4)

    def _kernels(self) -> dict:
        """Everything that an accelerator's kernels may depend on."""
        fields = {key: value for key, value in self.config.record().items() if key not in ("sum", "chunks", "hosts")}
        fields["dtypes"] = grad_dtypes(self.parameters, self._reduces_rows)
        fields["one_shot"] = self._reduces_rows or self.config.is_one_shot(self.world_size)
        fields["local_wire"] = self.config.local_wire if self.ranks_per_host > 1 else None
        return fields

    def stop(self, reason: str) -> None:
        """Stops the engine; buckets under way fail with `reason`. Idempotent."""
        if self.has_engine:
            self.synchronizer.stop(reason)
            self.unwatch()


@atexit.register
def _leave_all() -> None:
    # Worker threads must not outlive the interpreter.
    for session in list(_made):  # also the stopped ones, which still have channels
        session.synchronizer.leave("the process is exiting")


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=_made.clear)
