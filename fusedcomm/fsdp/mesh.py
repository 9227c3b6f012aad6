"""The sums of the modules that are on one mesh: their sessions, what sends them, and what is told of them."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fusedcomm.config import Config, LocalOptions
from fusedcomm.fsdp.all_gather import FusedAllGather
from fusedcomm.fsdp.comm import FusedReduceScatter, Pending
from fusedcomm.fsdp.grid import Grid, Traffic
from fusedcomm.fsdp.levels import Sums, check_hosts
from fusedcomm.fsdp.modules import Sharded
from fusedcomm.fsdp.plan import FsdpPlan
from fusedcomm.fsdp.replicas import ReplicaSums
from fusedcomm.native import _C
from fusedcomm.session.plan import Row
from fusedcomm.session.session import Mode, Session
from fusedcomm.session.stats import Stats


class MeshSums:
    """The sums of the modules on one mesh.

    Args:
        rows: of the reduce-scatter. between: of the all-reduce. Both are None where torch reduces.
        first_index: the number of the first of these modules among all of the model.
    """

    def __init__(
        self,
        config: Config,
        sums: Sums,
        rows: Session | None,
        between: ReplicaSums | None,
        sharded: Sequence[Sharded],
        first_index: int,
    ) -> None:
        self.rows, self.between = rows, between
        self.config, self._sums = config, sums
        self.comms = [
            FusedReduceScatter(rows, between, each, first_index + place, sharded[:place], sums.wire_of)
            for place, each in enumerate(sharded)
        ]
        self._all_gathers = [
            self._all_gather_of(each, first_index + len(sharded) + place) for place, each in enumerate(sharded)
        ]
        self._share_weights()
        if self.sessions:
            self.grid = Grid.of(rows, None if between is None else between.session)
            check_hosts(config, self.grid)

    @staticmethod
    def attached(
        config: Config,
        sums: Sums,
        sharded: Sequence[Sharded],
        first_index: int,
        local: LocalOptions,
        announce: bool,
        problem: Exception | None,
        made: list[Session],
    ) -> "MeshSums":
        """Connects the ranks of this mesh. Raises this rank's `problem`, or that of a rank that shares a session.

        made: gets the sessions, also those before an error.
        """
        group, replicas = sharded[0].process_group, sharded[0].replicas
        parameters = [p for each in sharded for p in each.parameters]
        # Every rank decodes what all others have encoded for it, as the owner of a part does in a two-shot.
        also_agree = {
            "fsdp": [[p.name, p.row_numel] for p in parameters],
            "levels": repr(config),  # the two sums have configurations of their own
        }
        options = {"announce": announce, "also_agree": also_agree}
        device = sharded[0].device
        rows, between = None, None
        if sums.rows is not None:
            try:
                rows = Session(sums.rows, group, None, local, device, reduces_rows=True, problem=problem, **options)
                made.append(rows)
            except Exception as error:
                if sums.replicas is None:
                    raise
                problem = problem or error  # for the ranks with the same shards, which are told next
        if sums.replicas is not None:
            wires = {p.name: config.wire_number(p.name, p.tensor) for p in parameters}
            session = Session(sums.replicas, replicas, None, local, device, problem=problem, **options)
            made.append(session)
            session.use_comparison([(p.name, p.tensor) for p in parameters])
            between = ReplicaSums(session, wires)
        return MeshSums(config, sums, rows, between, sharded, first_index)

    def _all_gather_of(self, sharded: Sharded, index: int) -> AllGather:
        """What FSDP2 will call to gather a module's parameters. index: of its rows in the session."""
        found, config = sharded.all_gather, self.config
        if self.rows is None:
            return found
        if config.params == "fp32":  # watched, on a CPU
            is_watched = sharded.device.type == "cpu"
            return FusedAllGather(self.rows, sharded, index, None, found, False) if is_watched else found
        number = self.rows.config.number_of(config.params)

        def wire_of(name: str, parameter: torch.Tensor) -> int:
            return _C.EXACT_WIRE if config.gathers_exactly(name, parameter) else number

        return FusedAllGather(self.rows, sharded, index, wire_of, found, config.params_kept)

    @property
    def coded_all_gathers(self) -> list[FusedAllGather]:
        """Those that send parameters in codes."""
        return [each for each in self._all_gathers if isinstance(each, FusedAllGather) and each.has_codes]

    def _share_weights(self) -> None:
        """With both sums, the reduce-scatter gives its ranks' sum of weights to the all-reduce, which divides."""
        if self.weights is not None and self.rows is not None and self.between is not None:
            rank = dist.get_rank()  # the two sums have different numbers for it
            self.rows.weights.defer(rank)
            self.between.session.weights.spread(self.num_shards * self.num_replicas, rank)

    @property
    def weights(self) -> "_C.PassWeights | None":
        """See :class:`fusedcomm.session.handle.Runs`."""
        return self.sessions[0].weights if self.sessions else None

    @property
    def sessions(self) -> list[Session]:
        """The sessions of the reduce-scatter and of the all-reduce, those that there are."""
        all_reduce = None if self.between is None else self.between.session
        return [each for each in (self.rows, all_reduce) if each is not None]

    @property
    def is_off(self) -> bool:
        """Whether torch reduces the gradients of these modules."""
        return not self.sessions

    @property
    def num_shards(self) -> int:
        """Ranks of a reduce-scatter; 1 without one."""
        return _size(self.comms[0].sharded.process_group)

    @property
    def num_replicas(self) -> int:
        """Ranks of the all-reduce between replicas; 1 without one."""
        return _size(self.comms[0].sharded.replicas)

    @property
    def num_steps(self) -> int:
        """Backward passes that reduced, those before a loaded state included. Waits for nothing."""
        return next((comm.num_calls for comm in self.comms if comm.sharded.is_trained), 0)

    def start(self, pending: Pending) -> None:
        """Takes the place of torch's own reduce-scatters and all-gathers."""
        for comm, all_gather in [] if self.is_off else zip(self.comms, self._all_gathers, strict=True):
            comm.use(pending)
            comm.sharded.use(comm, all_gather)

    def rest(self) -> None:
        """Restores torch's own collectives."""
        for comm in [] if self.is_off else self.comms:
            all_gather = comm.sharded.all_gather
            inner = all_gather.inner if isinstance(all_gather, FusedAllGather) else all_gather
            comm.sharded.use(DefaultReduceScatter(), inner)

    def stop(self, reason: str) -> None:
        """Stops the engines and restores torch's own collectives."""
        self.rest()
        for session in self.sessions:
            session.stop(reason)

    def plan(self, others: tuple[FsdpPlan, ...] = ()) -> FsdpPlan:
        """The plan of these modules. `others`: plans of further meshes, which follow it."""
        if self.is_off:
            wire = wire_of_replicas = "off"
        else:
            wire_of_replicas = self.config.wire
            wire = wire_of_replicas if self._sums.rows is None else self._sums.rows.wire
        gathered, rings_nbytes = self._gathered()
        through_torch = [session.through_torch for session in self.sessions] or [None]
        return FsdpPlan(
            wire=wire,
            wire_of_replicas=wire_of_replicas,
            world_size=self.num_shards * self.num_replicas,
            num_shards=self.num_shards,
            num_replicas=self.num_replicas,
            codec="none" if self.is_off else self.sessions[0].codec,
            scratch_nbytes=sum(session.synchronizer.engine.scratch_nbytes for session in self.sessions),
            params="fp32" if self.is_off else self.config.params,
            gathered_nbytes=rings_nbytes + sum(plan.sent_nbytes for plan in gathered),
            exact_gathered_nbytes=self._ring_nbytes([comm.sharded for comm in self.comms]),
            kept_nbytes=sum(each.kept_nbytes for each in self.coded_all_gathers),
            summed_nbytes=sum(plan.sent_nbytes for plan in self._between_plans()),
            rows=tuple(self._row(comm) for comm in self.comms),
            through_torch=next(filter(None, through_torch), through_torch[0]),
            traffic=None if self.is_off else self._traffic(self.grid),
            levels=""
            if self.rows is None
            else self.rows.levels.described(self._sums.rows.local_wire, self.rows.device.type),
            one_level_reason="" if self.rows is None else self.rows.levels.why_not_two,
            off=self.is_off,
            others=others,
        )

    def _traffic(self, grid: Grid) -> Traffic:
        """The bytes that the hosts of these ranks send."""
        scattered = [] if self.rows is None else [comm.native().plan(gathers=False) for comm in self.comms]
        return grid.traffic(scattered, *self._gathered(), self._between_plans())

    def _between_plans(self) -> list["_C.BucketPlan"]:
        """The plans of a step's all-reduces between replicas; empty where torch sums."""
        if self.between is None:
            return []
        sums, native = [], self.between.session.native_config
        for comm in self.comms:
            trained = [p for p in comm.sharded.parameters if p.is_trained]
            slices = [(p.row_numel, self.between.wire_of(p.name, p.tensor)) for p in trained]
            sums.append(_C.plan_bucket(native, self.num_replicas, torch.empty(0, dtype=torch.float32), slices))
        return sums

    def _gathered(self) -> tuple[list["_C.BucketPlan"], int]:
        """The plans of a step's all-gathers in codes, and the bytes that a rank sends in those of torch."""
        coded = self.coded_all_gathers
        rings = [comm.sharded for comm, each in zip(self.comms, self._all_gathers, strict=True) if each not in coded]
        return [plan for each in coded for plan in each.plans], self._ring_nbytes(rings)

    def _ring_nbytes(self, sharded: Sequence[Sharded]) -> int:
        """Bytes that a rank sends in a step's all-gathers of these modules if torch gathers all of them."""
        return (self.num_shards - 1) * sum(each.num_gathers * each.row_nbytes for each in sharded)

    def warn_of_hosts(self) -> None:
        """Warns, on one rank of the mesh, if shards lie across hosts and replicas within, which sends more, if
        reduce-scatters on one level send more between hosts than torch's, or if there are no codes to keep."""
        if self.rows is None or self.grid.ranks[0][0] != dist.get_rank():
            return
        if self.config.params_kept and not any(each.kept_nbytes for each in self.coded_all_gathers):
            levels, why = self.rows.levels, "all modules keep their parameters, see reshard_after_forward"
            if levels.ranks_per_host == 1:
                why = levels.one_level_reason or f"these shards have one level with hosts={self.config.hosts!r}"
            warnings.warn(f"fusedcomm: params_kept=True keeps nothing: {why}", stacklevel=4)
        if self.between is None:
            self._warn_of_one_level()
            return
        now, by_host = self._traffic(self.grid).nbytes, self._traffic(self.grid.by_host()).nbytes
        if by_host < now:
            warnings.warn(
                f"fusedcomm: the shards of a copy lie on several hosts, so a host sends {now / 2**20:.2f} MiB to "
                f"others in a step, and {by_host / 2**20:.2f} MiB if the last dimension of the mesh is the ranks of a "
                "host",
                stacklevel=4,
            )

    def _warn_of_one_level(self) -> None:
        """Warns if reduce-scatters send more between hosts than torch's: gloo's is an all-reduce, NCCL's a ring."""
        passes = 2 if self.comms[0].sharded.device.type == "cpu" else 1
        ring_nbytes = (self.num_shards - 1) * sum(comm.sharded.reduced_nbytes for comm in self.comms)
        torchs = self.grid.traffic([], [], passes * ring_nbytes, [])
        now = self._traffic(self.grid).gradients_nbytes
        self.rows.levels.warn_of_more(self.config, now, "torch's own reduce-scatter", torchs.nbytes, stacklevel=5)

    def _row(self, comm: FusedReduceScatter) -> Row:
        trained = [p for p in comm.sharded.parameters if p.is_trained]
        nbytes = 4 * self.num_shards * sum(p.row_numel for p in trained)
        wires = []
        if not self.is_off:
            # With two sums, the row has the wires of the reduce-scatter.
            config, wire_of = self._sums.rows or self.config, self._sums.wire_of
            numbers = [wire_of(p.name, p.tensor) for p in trained]
            wires = ["fp32" if number == _C.EXACT_WIRE else config.numbered_wires[number] for number in numbers]
        return Row(
            label=comm.sharded.title,
            parameters=tuple(p.name for p in trained),
            grad_nbytes=nbytes,
            wire="+".join(dict.fromkeys(wires)),
            sum="rows" if self.num_shards > 1 else "sum",
            num_chunks=None,
            sent_nbytes=nbytes * (self.num_shards - 1) // self.num_shards
            if self.rows is None
            else comm.native().sent_nbytes,
        )

    def stats(self) -> Stats:
        """Counts and times of this rank."""
        if self.is_off:
            return Stats(off=True)
        return self.sessions[0].stats()


class Meshes:
    """The sums that run behind the handle of a model.

    Attributes:
        meshes: that of the first module which is not left to torch first: as a rule the model's own.
        pending: the reduce-scatters under way.
    """

    def __init__(self, meshes: list[MeshSums]) -> None:
        self.meshes = sorted(meshes, key=lambda mesh: mesh.is_off)
        self.weights = self.meshes[0].weights
        self.pending = Pending(None if self.weights is None else self.meshes[0].sessions[-1].weights)
        for mesh in self.meshes:
            mesh.start(self.pending)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of steps in turns with other handles' steps: afterwards these sums rest, and torch has its own."""
        for mesh in self.meshes:
            mesh.start(self.pending)
        try:
            yield
        finally:
            for mesh in self.meshes:
                mesh.rest()

    @property
    def comms(self) -> list[FusedReduceScatter]:
        """The reduce-scatters of all modules."""
        return [comm for mesh in self.meshes for comm in mesh.comms]

    @property
    def mode(self) -> Mode:
        """Off if torch reduces all gradients."""
        return "off" if self.meshes[0].is_off else "active"

    @property
    def session(self) -> Session:
        """The first session of the model's own mesh."""
        return self.meshes[0].sessions[0]

    def stop(self, reason: str) -> None:
        """Stops the engines and restores torch's own collectives."""
        for mesh in self.meshes:
            mesh.stop(reason)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def by_mesh(sharded: Sequence[Sharded]) -> list[list[Sharded]]:
    """The modules by the ranks over which their gradients are summed, in the order of their first modules."""
    meshes: dict[tuple[int, int], list[Sharded]] = {}
    for each in sharded:
        meshes.setdefault((id(each.process_group), id(each.replicas)), []).append(each)
    return list(meshes.values())
