"""A session: the channels, the ranks' agreement and the engine of one attachment, however it was attached."""

import atexit
import contextlib
import dataclasses
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from fusedcomm import chunks, env
from fusedcomm.config import STALL_AFTER_S, Config, LocalOptions, choose_stall_after
from fusedcomm.devices.cpu import CpuPath
from fusedcomm.devices.cuda import CudaPath
from fusedcomm.native import _C
from fusedcomm.ranks import agreement, groups, hosts
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError
from fusedcomm.ranks.peers import GivenUpError, Peers, private_store, warn_alone
from fusedcomm.ranks.watch import Watch
from fusedcomm.session import levels, plan, weights
from fusedcomm.session.compare import Comparison, ParameterDifference
from fusedcomm.session.parameters import NamedParameter, grad_dtypes, trainable
from fusedcomm.session.record import record_of
from fusedcomm.session.runs import Runs
from fusedcomm.session.stats import NonFinite, Stats, collect, nonfinite_rows
from fusedcomm.trace.recorder import Recorder

T = TypeVar("T")

_GIVEN_UP = "given up"
"""Store key at which a rank says why it cannot attach. Ranks that are connecting then stop waiting for it."""

_made: "weakref.WeakSet[Session]" = weakref.WeakSet()


class Session(Runs):
    """A running engine on one process group.

    Attributes:
        explains: whether an error waits for what the watch finds out about the other ranks.

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
        problem: the error that keeps this rank from taking part. It is raised once the other ranks have been told.

    Raises:
        RuntimeError: fusedcomm has no path for the device over the group's backend, torch.distributed does not know the
            group, or the ranks do not agree (the same text on every rank).
        ValueError: an option does not fit the device, the machine or the ranks.
        PeerLostError: a rank is lost before it has attached.
    """

    explains = True

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
        also_agree: dict | None = None,
        watched: bool = True,
        reduces_rows: bool = False,
        problem: Exception | None = None,
    ) -> None:
        groups.refuse_unknown(process_group)
        self.config = cfg
        self.keeps_residuals = cfg.feedback is not None
        self._reduces_rows = reduces_rows
        self.local = local
        self.device = device
        self.process_group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.parameters = parameters
        self._num_gathered = self._num_beside = 0
        self._gathered: BoundedStore | None = None
        if beside is None:
            path = self._agree_on_plan(announce, also_agree, problem)
        else:
            beside._num_beside += 1
            self.peers = beside.peers
            self._store = beside._store.under(f"beside/{beside._num_beside}")
            self.host_names = beside.host_names
            self.levels = levels.find(cfg, self.host_names, self.rank)
        if self.rank == 0:
            self._store.set("run", uuid.uuid4().hex)
        synchronizer, problem = None, None
        try:
            self.peers.doing("attaching: connecting with the other ranks")
            transport = self._connect(path, announce) if beside is None else self._connect_beside(beside, announce)
            fitting = chunks.fitting_memory(self.effective_config, self.world_size, device.type, self.ranks_per_host)
            with fitting:
                synchronizer = _C.Synchronizer(
                    config=self.native_config,
                    device=self.native_device,
                    transport=transport,
                    parameters=[(p.tensor, p.name, p.wire) for p in parameters or []],
                    wire_1d=cfg.wire_number_1d,
                    grad_device=device,
                    measure_every=cfg.measure_every,
                )
            if self.world_size > 1:
                self._store.set(f"watch/who/{self.rank}", groups.describe_process(process_group))
        except Exception as error:
            problem = error
        found = {
            "hosts": self.hosts.groups if self.hosts else None,
            "chunks": dataclasses.astuple(self.effective_config.chunks) if synchronizer else None,
        }
        try:
            self.peers.doing("attaching: its engine is ready")
            self._agree(self._store, "ready", found, problem)  # raises if any rank could not make its engine
        except Exception:
            if synchronizer is not None:  # freed now, because a caller may keep the error and with it the synchronizer
                synchronizer.stop("another rank has no engine")
                synchronizer.engine.free_workspaces()
            raise
        self.synchronizer = synchronizer
        self.weights = weights.used(synchronizer, cfg)
        self.use_comparison([(p.name, p.tensor) for p in parameters or []])
        self._end_watch: weakref.finalize | None = None
        place = self.hosts.place(self.rank)[::-1] if self.ranks_per_host > 1 else (self.rank, 0)
        self.recorder = Recorder(synchronizer, self._store, self.peers, place)
        _made.add(self)
        self.peers.doing("in training, attached")
        if watched:
            self.watch()

    def _agree_on_plan(
        self, announce: bool, also_agree: dict | None, problem: Exception | None
    ) -> "CpuPath | CudaPath":
        """Returns this rank's path once the ranks have agreed. Sets the session's stores, peers and hosts."""
        # An error of this rank alone is published, because the other ranks would otherwise wait for this one.
        record, path, stall_after_s, timeout = {}, None, STALL_AFTER_S, dist.default_pg_timeout
        with contextlib.suppress(Exception):  # no backend for the device: check_backend says so below
            timeout = groups.group_timeout(self.process_group, self.device)
        self._store = store = private_store(self.process_group, timeout)
        try:
            if problem is not None:
                raise problem
            self.config.refuse_on(self.device.type)
            groups.check_backend(self.process_group, self.device)
            stall_after_s = choose_stall_after(self.local.stall_after, timeout.total_seconds())
            path = self._path(announce and self.rank == 0)
            record = record_of(self, also_agree or {})
        except Exception as error:
            problem = error
        self.peers = Peers(self.process_group, store, timeout, stall_after_s)
        self.peers.doing("attaching: comparing its configuration with the others'")
        hosts.publish_name(store, self.rank)
        self._agree(store, "plan", record, problem)
        # The ranks have agreed, so each has published its host name: reading the names does not wait.
        self.host_names = hosts.published_names(store, self.world_size)
        self.levels = levels.find(self.config, self.host_names, self.rank)
        return path

    def _connect(self, path: "CpuPath | CudaPath", announce: bool) -> "_C.C10dTransport":
        if self.ranks_per_host > 1 and not path.has_two_levels:
            path = self._path(announce and self.rank == 0, two_levels=True)  # its kernels for two levels, too
        self.native_device, self._transport = self._connect_path(path)
        self.s_per_byte, self.codec = path.s_per_byte, path.codec
        return self._connect_hosts()

    def _connect_path(self, path: "CpuPath | CudaPath") -> tuple["_C.Device", "_C.C10dTransport"]:
        connect, group, device = path.connect, self.process_group, self.device
        return self._while_connecting(lambda: connect(group, device, groups.own_client(self._store)))

    def _while_connecting(self, connect: Callable[[], T]) -> T:
        """Returns what `connect` returns. Raises if another rank is lost or says that it cannot attach."""

        def on_device() -> T:  # every thread has its own current device
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                return connect()

        return self.peers.call(
            on_device,
            "connecting with the other ranks to attach",
            given_up=lambda: self._store.get(_GIVEN_UP).decode() if self._store.check([_GIVEN_UP]) else "",
        )

    def _connect_beside(self, beside: "Session", announce: bool) -> "_C.C10dTransport":
        if isinstance(beside.native_device, _C.CpuDevice) or self._kernels() == beside._kernels():
            self.native_device, self.codec = beside.native_device, beside.codec
        else:
            path = self._path(announce and self.rank == 0, two_levels=self.ranks_per_host > 1)
            self.native_device, _ = self._connect_path(path)
            self.codec = path.codec
        self.s_per_byte = beside.s_per_byte
        self._transport = beside._transport
        return beside.synchronizer.transport if self.levels.are_those_of(beside.levels) else self._connect_hosts()

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
            watch = Watch(
                self.synchronizer,
                self.rank,
                self.world_size,
                self.store("watch"),
                stall_after_s=self.peers.stall_after_s,
                timeout_s=self.peers.timeout.total_seconds(),
                store_port=groups.store_port(self.process_group),
                store_text=groups.describe_store(self.process_group),
                lost=self.peers.lost,
                explains=self.explains,
            )
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
    def ranks_per_host(self) -> int:
        """Ranks on each host if sums have two levels, else 1."""
        return self.levels.ranks_per_host

    @property
    def hosts(self) -> hosts.Hosts | None:
        """The hosts; see :class:`Levels`."""
        return self.levels.hosts

    @property
    def native_config(self) -> "_C.WireConfig":
        """The engine's configuration."""
        config = self.effective_config
        return config.native(config.chunks, self.ranks_per_host, self.levels.own_host)

    @property
    def effective_config(self) -> Config:
        """The configuration with the chunks that suit the link."""
        return chunks.resolved(self.config, self.world_size, self.device.type, self.s_per_byte, self.ranks_per_host)

    def _connect_hosts(self) -> "_C.C10dTransport":
        """The transport; if sums have two levels, with channels for both."""
        if self.ranks_per_host == 1:
            return self._transport

        group, device, found = self.process_group, self.device, self.hosts
        channels = self._while_connecting(
            lambda: groups.make_host_channels(group, device, groups.own_client(self._store), found)
        )
        local_rank, host = self.hosts.place(self.rank)
        return _C.with_hosts(
            self._transport,
            local_rank=local_rank,
            ranks_per_host=self.hosts.ranks_per_host,
            host=host,
            num_hosts=self.hosts.num_hosts,
            local_scatter=channels.local_scatter,
            local_gather=channels.local_gather,
            cross_scatter=channels.cross_scatter,
            cross_gather=channels.cross_gather,
        )

    def _agree(self, store: BoundedStore, what: str, record: dict, problem: Exception | None) -> None:
        """Compares the ranks' records, and raises this rank's `problem`, another rank's, or a difference of records."""
        if problem is not None and what == "ready" and not isinstance(problem, GivenUpError):
            with contextlib.suppress(RuntimeError):  # the store has failed, too
                why = f"{self.peers.title(self.rank)} cannot attach: {problem}"
                self._store.set(_GIVEN_UP, why.replace("fusedcomm: ", ""))
        agreement.agree_to_attach(self.peers, store.under(what), record, problem)

    def confirm(self, problem: Exception | None, stop: Callable[[str], object] | None = None) -> None:
        """Raises what a rank has found since its session was made, this rank's `problem` first, once `stop` was called.
        A collective call, at most one for each session."""
        try:
            self._agree(self._store, "confirmed", {}, problem)
        except StoreError:
            pass  # training needs no store; this rank has no problem, or that would have been raised
        except Exception:
            (stop or self.stop)("a rank could not attach")
            raise

    def _path(self, announce: bool, two_levels: bool | None = None) -> "CpuPath | CudaPath":
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
            announce,
            self.config.needs_two_levels if two_levels is None else two_levels,
            self._reduces_rows,
        )

    def store(self, name: str) -> dist.Store:
        """The part of this attachment's store that has this name."""
        return self._store.under(name).native

    def stats(self) -> Stats:
        """Counts and times of this rank."""
        return collect(self.synchronizer, self.world_size)

    def nonfinite_report(self) -> list[NonFinite]:
        """See :meth:`fusedcomm.ddp.handle.Handle.nonfinite_report`."""
        return self.everybodys(nonfinite_rows(self.synchronizer, self.rank))

    def everybodys(self, own: list[NonFinite]) -> list[NonFinite]:
        """The rows of all ranks, the greatest counts first. A collective call."""
        rows = [dataclasses.astuple(row) for row in own]
        everybodys = [NonFinite(*row) for rows in self.gather("nonfinite", rows, "nonfinite_report()") for row in rows]
        return sorted(everybodys, key=lambda row: (-row.count, row.rank, row.parameter))

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
        self._comparison = comparison = Comparison(self, named)
        due = weakref.WeakMethod(comparison.when_due)  # the engine must not keep what the session keeps
        every = self.config.compare_every if comparison.named else None
        self.synchronizer.before_every(every or 0, lambda: due()())

    def compare_parameters(self) -> ParameterDifference | None:
        """See :meth:`fusedcomm.session.handle.CommHandle.compare_parameters`."""
        return self._comparison.now()

    def plan(self, bucket_nbytes_caps: list[int] | None, off: bool = False) -> plan.Plan:
        """The plan for the buckets of the last backward pass; before the first, for those that DDP is expected to make.

        Args:
            bucket_nbytes_caps: DDP's caps on the bytes of its buckets. None: not known; no buckets are predicted.
            off: whether the buckets go through DDP's own all-reduce and not through this session.
        """
        now = trainable(self.parameters)
        own_host = None if self.config.hosts is None else self.levels.own_host
        rows = () if off else plan.actual_rows(self.world_size, own_host, self.synchronizer)
        predicted = not rows
        if predicted and self.parameters is not None and bucket_nbytes_caps is not None:
            native = None if off else self.native_config
            rows = plan.predicted_rows(native, self.world_size, own_host, now, bucket_nbytes_caps)
        return plan.Plan(
            config=self.effective_config,
            world_size=self.world_size,
            device_type=self.device.type,
            codec=self.codec,
            scratch_nbytes=self.synchronizer.engine.scratch_nbytes,
            exempt=() if off else tuple(p.name for p in now if p.wire == _C.EXACT_WIRE),
            buckets=rows,
            predicted=predicted,
            hosts=self.hosts,
            one_level_reason=self.levels.one_level_reason,
            off=off,
            ranks_on_host=env.local_world_size(),
            frozen=self.parameters is not None and not now,
        )

    def max_over_ranks(self, value: float, what: str) -> float:
        """The largest of the ranks' values. A collective call between backward passes; `what` names it in reports."""
        return self.synchronizer.max_over_ranks(value, what)

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
        self.synchronizer.stop(reason)
        self.unwatch()


@atexit.register
def _leave_all() -> None:
    # Worker threads must not outlive the interpreter.
    for session in list(_made):  # also the stopped ones, which still have channels
        session.synchronizer.leave("the process is exiting")


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=_made.clear)
