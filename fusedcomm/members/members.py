"""``fusedcomm.Members``: ranks that come and go while training runs."""

import contextlib
import datetime
import os
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedcomm import env, log
from fusedcomm.config import check
from fusedcomm.members.plane import addresses
from fusedcomm.members.plane.control import ControlPlane
from fusedcomm.members.plane.listener import numeric_host
from fusedcomm.members.plane.view import Decision, Member, View
from fusedcomm.members.training.place import check_state, share_of
from fusedcomm.ranks import agreement, bounded_store, channels, groups, own_address, torch_groups
from fusedcomm.ranks.objects import pack
from fusedcomm.ranks.own_group import OwnGroup, served_store
from fusedcomm.ranks.peers import Peers
from fusedcomm.session.surface import Sealed

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

PROGRESS = "progress"
"""The kind of request that asks a member for its last finished step."""
_POLL_S = 0.02
LEAVE_TIMEOUT_S = 60.0
"""Seconds that a rank which leaves waits for the others to finish its last step."""
INSTALL_TIMEOUT_S = 1800.0
"""Seconds that the members of a new view wait for the last of them, which may be in a long forward pass."""


class Members(Sealed):
    """The ranks that train together, which may be lost and may join while training runs.

    ::

        members = fusedcomm.Members(min_ranks=2)                         # after init_process_group
        members = fusedcomm.Members(join="10.0.0.7:29411", min_ranks=2)  # in a process that joins; no process group

        members = fusedcomm.Members(join="auto", min_ranks=2)            # either, as the launcher says

        model = fusedcomm.DataParallel(model, config="int8", members=members)
        optimizer = torch.optim.AdamW(model.parameters())
        members.carry(optimizer=optimizer, scheduler=scheduler)          # what a rank that joins gets, too

    A backward pass during which ranks are lost ends on every survivor with the mean over the survivors, and the same
    bits on all of them; if one of them had all means already, with the mean over all. No backward pass is repeated.
    There is no server: any rank may be lost, the first one included. A rank that joins needs the address of one member,
    ``members.address``. Its first gradients count, and its parameters have the others' bits.

    Args:
        join: "host:port" of any member of running training, or of several with commas between. None: this process is
            one of those that begin it. "auto": one or the other, as FUSEDCOMM_MEMBERS and the launcher say, see
            members/plane/addresses.py. A process that begins then calls ``init_process_group("gloo")``, unless that was
            called.
        min_ranks: with fewer ranks, all raise TooFewRanksError in ``backward()``.
        microbatches: of a step, in all: see :attr:`share`. None: the number is not kept.
        silence: seconds without a sign of life after which a rank counts as silent. A closed connection is noticed at
            once and needs no vote. Silent ranks may be training on, so those that go on without them must be more than
            half of the last view's living ranks, or half with the lowest rank; the others raise MinorityError.
        host: the numeric address, or name, at which the other ranks reach this process. None: that of the interface
            which leads to the process group's store, or to the member that is asked.

    Raises:
        RuntimeError: no process group, without `join`; with "auto", variables do not say what it needs, or this
            process begins training where other training runs.
        JoinRefusedError: with "auto", nobody answers.
        ValueError: an argument or a variable is out of range.

    ``with fusedcomm.Members(…) as members:`` leaves when the block ends. A copy, made with ``copy`` or ``pickle``, as
    of a model that has members, is none of them: whatever is asked of it raises RuntimeError.

    Attributes:
        joins: where this process joins; None if it is one of those that began.
        plane: how the members agree, for fusedcomm itself.
    """

    _shows = (
        *("address", "carry", "joins", "leave", "load_state_dict", "microbatches", "min_ranks", "num_microbatches"),
        *("on_change", "portion", "rank", "ranks", "share", "size", "state_dict", "step", "view"),
    )

    def __init__(
        self,
        *,
        join: str | None = None,
        min_ranks: int = 1,
        microbatches: int | None = None,
        silence: float = 10.0,
        host: str | None = None,
    ) -> None:
        check.whole("min_ranks", min_ranks, 1, 2**31 - 1, "a whole number of ranks, 1 or more")
        check.positive("silence", silence, "a number of seconds greater than 0")
        if microbatches is not None:
            check.whole("microbatches", microbatches, 1, 2**31 - 1, "a whole number of microbatches, 1 or more")
        self._file = addresses.MembersFile.of_environment()
        if join == "auto":
            join = addresses.to_join(2 * silence)
            if join is None and not dist.is_initialized():
                _init_process_group()
        elif join is None and not dist.is_initialized():
            raise RuntimeError(
                "fusedcomm.Members needs ranks: call torch.distributed.init_process_group first, or give join="
                "'host:port', the address of a member of running training"
            )
        if join is None and min_ranks > dist.get_world_size():
            raise ValueError(f"fusedcomm: min_ranks={min_ranks} with {dist.get_world_size()} ranks: start more")
        self.min_ranks, self.microbatches, self.joins = min_ranks, microbatches, join
        self._noted: set[str] = set()
        if join is not None and self._file is not None:
            self._file.note([], "")  # fails now, before a port is open, if it will
        cpu, world = torch.device("cpu"), dist.group.WORLD
        timeout = dist.default_pg_timeout if join is not None else groups.group_timeout(world, cpu)
        near = [bounded_store.store_address(world)] if join is None else map(addresses.split, join.split(","))
        own_host = numeric_host(host) if host is not None else _address_towards(filter(None, near))
        self._store: dist.TCPStore | None = served_store(own_host, timeout=datetime.timedelta(seconds=60))
        info = {
            "store": [own_host, self._store.port],
            "process": own_address.own_process(),
            "timeout_s": timeout.total_seconds(),
        }
        self.plane = ControlPlane(uuid.uuid4().hex, info, min_ranks=min_ranks, silence_s=silence, host=own_host)
        self._current: View | None = None
        self._callbacks: list[Callable[[Decision], object]] = []
        self.carried: dict[str, Any] = {}
        self.training: Any = None
        """The training whose ranks these are (training/views.py); None before a reducer is made."""
        self.num_microbatches = 0
        """Microbatches, or without `microbatches` batches, that all ranks have had so far: times the size of one, the
        position in the data."""
        self.portion = (0, 1)
        """(first, count): this rank's microbatches of the present step among those of all ranks."""
        self.weighs = True
        """Whether this rank's microbatches count, where their number is kept."""
        self.first_step = 0
        """The step at which the training began that these members do: of the state that was loaded."""
        self._seal()
        if join is None:
            self._found(cpu)

    # ---- what users read

    @property
    def address(self) -> str:
        """ "host:port" at which another process joins."""
        return self.plane.address

    @property
    def view(self) -> int:
        """The number of the present view: of who trains together."""
        return self.current.number

    @property
    def ranks(self) -> tuple[str, ...]:
        """The members' addresses, by rank."""
        return tuple(member.address for member in self.current.members)

    @property
    def rank(self) -> int:
        """This process's rank in the present view."""
        return self.current.rank_of(self.plane.member.uid)

    @property
    def size(self) -> int:
        """The number of ranks in the present view."""
        return len(self.current.members)

    @property
    def step(self) -> int:
        """Steps that have ended: synchronized backward passes, those before this process joined included, and those
        before the checkpoint whose state was loaded."""
        return self.first_step + (0 if self.training is None else self.training.step)

    @property
    def share(self) -> int:
        """This rank's microbatches of the present step; those of all ranks are `microbatches`. Each is a backward pass,
        all but the last within ``no_sync()``.

        The mean is over microbatches, so a step in which ranks are lost has the mean over those of the others, and
        from the next step on these take over the lost rank's share. In the step in which a rank joins the others have
        all microbatches already: it computes one that weighs nothing. Raises RuntimeError without `microbatches`.
        """
        if self.microbatches is None:
            raise RuntimeError("fusedcomm: members.share needs Members(microbatches=…), the number of a step in all")
        return self.portion[1]

    def on_change(self, callback: Callable[[Decision], object]) -> None:
        """Calls ``callback(decision)`` on this rank's main thread when another view begins: `decision.view`, `.lost`,
        `.joined`. It may be called within ``backward()``. An exception is raised from there."""
        self._callbacks.append(callback)

    def carry(self, **objects: Any) -> None:
        """Names what a rank that joins gets from the others besides the model: optimizers, schedulers, samplers,
        anything with ``state_dict()`` and ``load_state_dict()``.

        Every rank names the same, when the reducer and the objects are made and before the first backward pass. On a
        rank that joins this loads the others' state.

        Raises:
            RuntimeError: no reducer has these members yet; on a rank that joins, the others do not carry such a name.
            TypeError: an object has no ``state_dict()`` or no ``load_state_dict()``, or its state has something that
                cannot be sent. Nothing is pickled, see ranks/objects.py.
        """
        for name, carried in objects.items():
            if not callable(getattr(carried, "state_dict", None)) or not callable(
                getattr(carried, "load_state_dict", None)
            ):
                raise TypeError(f"fusedcomm: carry({name}=…) needs an object with state_dict() and load_state_dict()")
            pack(carried.state_dict(), f"carry({name}=…).state_dict()")
        if self.training is None:
            raise RuntimeError("fusedcomm: members.carry() comes after DataParallel or GradReducer(…, members=members)")
        for name, carried in objects.items():
            self.carried[name] = carried
            self.training.receive(name, carried)

    def state_dict(self) -> dict[str, int]:
        """The step, and how many microbatches all ranks have had, for a checkpoint; equal on all ranks, and good for
        any number of them. Save it between steps."""
        return {"step": self.step, "num_microbatches": self.num_microbatches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on at the step of :meth:`state_dict`. Load it on every rank that begins training, before the first step;
        a rank that joins has the members' step already.

        Raises ValueError for what is no state of Members; RuntimeError in a rank that joins, and once steps have ended,
        unless it changes nothing. Ranks that have loaded different states raise RuntimeError, all of them, in the first
        step.
        """
        check_state(state, {"step", "num_microbatches"}, "Members")
        self.go_on_at(state["step"], state["num_microbatches"])

    def leave(self, reason: str = "it has left") -> None:
        """Tells the others that this process goes; they go on without it at once. Idempotent.

        Before, it waits until they have finished this rank's last step, at most a minute: they may need its means.
        """
        if self.training is not None and self._current is not None:
            self.wait_for_others(LEAVE_TIMEOUT_S)
        self.plane.leave(reason)
        if self.training is not None:
            self.training.close(reason)
        if self._current is None:  # it was refused: nobody has met it in its store
            self._store = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.leave("it has left" if error is None else f"it cannot go on: {error}")

    def __repr__(self) -> str:
        if "plane" not in vars(self):
            return "<fusedcomm.Members: a copy, and none of them>"
        if self._current is None:
            return f"<fusedcomm.Members: at {self.address}, joins {self.joins}>"
        left = ", has left" if self.plane.is_closed else ""
        return (
            f"<fusedcomm.Members: rank {self.rank} of {self.size} at {self.address}, view {self.view}, step "
            f"{self.step}{left}>"
        )

    def __getattr__(self, name: str) -> Any:
        if "plane" not in vars(self) and not name.startswith("__"):
            raise RuntimeError(
                f"fusedcomm: {name!r} was asked of a copy of Members, as of a model that has them: wrap the copied "
                "module with Members of its own, or only call it without gradients"
            )
        raise AttributeError(f"fusedcomm.Members has no {name!r}, but {', '.join(dir(self))}")

    def __reduce__(self) -> tuple:
        return object.__new__, (type(self),)

    # ---- for fusedcomm itself

    def go_on_at(self, step: int, num_microbatches: int) -> None:
        """Training begins at this step, after so many microbatches."""
        if (step, num_microbatches) == (self.step, self.num_microbatches):
            return
        if self.joins is not None:
            raise RuntimeError(
                f"fusedcomm: this rank joins at step {self.step} after {self.num_microbatches} microbatches, not at "
                f"{step} after {num_microbatches}: load checkpoints only where members.joins is None"
            )
        if self.training is not None and self.training.step > 0:
            raise RuntimeError(
                f"fusedcomm: the state is of step {step} after {num_microbatches} microbatches, and these members have "
                f"made {self.training.step} steps: load it on every rank before the first one"
            )
        self.first_step, self.num_microbatches = step, num_microbatches

    @property
    def current(self) -> View:
        """The present view. Raises RuntimeError in a process that has not joined yet."""
        if self._current is None:
            raise RuntimeError("fusedcomm: this process joins when a DataParallel or GradReducer is made with members=")
        return self._current

    def enter(self, view: View) -> None:
        """Notes that this rank runs in `view`; in the file for addresses, too."""
        self._current = view
        new = {member.address for member in view.members} - self._noted
        if self._file is not None and new:
            try:
                self._file.note(sorted(new), self.plane.job_name)
                self._noted |= new
            except RuntimeError as error:
                text = str(error)
                log.report(lambda: text)

    def begin_step(self) -> int:
        """Shares out the microbatches of a step that begins, among the ranks that there are now; returns how many."""
        total = self.microbatches or self.size
        first, count = share_of(total, self.rank, self.size)
        # Too many ranks for the microbatches: the last ones compute one that weighs nothing.
        self.weighs = count > 0
        self.portion = (first, count) if count else (0, 1)
        return total

    def tell(self, decision: Decision) -> None:
        """Calls what on_change() was given."""
        for callback in self._callbacks:
            callback(decision)

    def group(self, view: View, device: torch.device) -> OwnGroup:
        """Connects the members of `view`: a group whose store is hosted by its first rank, with a new communicator of
        NCCL's if gradients are on cuda. A collective call."""
        own, first = self.plane.member, view.members[0]
        host, port = first.info["store"]
        own_timeout = datetime.timedelta(seconds=first.info["timeout_s"])  # of sums: the same on all
        # A client for each view: a thread that an earlier view has left behind holds its client while it waits there.
        store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=60))
        of_view = dist.PrefixStore(f"view/{view.number}", store)
        rank, size = view.rank_of(own.uid), len(view.members)
        backends = {"cpu": channels.connect_gloo(of_view, "members", rank, size, own_timeout)}
        if device.type == "cuda":
            nccl = torch_groups.own_nccl(of_view, "members", rank, size, own_timeout, device, is_supervised=False)
            backends["cuda"] = nccl
        return OwnGroup(of_view, rank, size, own_timeout, backends)

    def wait_for_others(
        self, timeout_s: float, is_enough: Callable[[dict], bool] | None = None, *, in_view: bool = False
    ) -> None:
        """Waits until the others are as far as this rank, or are gone; at most so long.

        Args:
            is_enough: of what a member says of its progress. None: it has finished this rank's last step.
            in_view: whether it also ends when the members leave this view, in which case they may wait for this rank.
        """
        is_enough = is_enough or (lambda told: told["finished"] >= self.step - self.first_step - 1)
        until, view = time.monotonic() + timeout_s, self.current

        def waits() -> bool:
            return time.monotonic() < until and not (in_view and self.plane.barrier.is_superseded(view.number))

        for member in view.members:
            with contextlib.suppress(RuntimeError, LookupError):  # it is lost, or has left
                while member.uid != self.plane.member.uid and waits():
                    if is_enough(self.plane.request(member, PROGRESS, {})[0]):
                        break
                    time.sleep(_POLL_S)

    def _found(self, device: torch.device) -> None:
        """Tells the ranks that begin who they are, and a text that they have in common, and no other job. RuntimeError,
        on all, if another job runs, or if a rank cannot write to the file of members. A collective call."""
        why, what = "", "making its Members"
        try:
            if self._file is not None:
                if dist.get_rank() == 0:
                    addresses.refuse_a_running_job(self._file)
                self._file.note([], "")
        except RuntimeError as error:
            why = str(error)
        own = {"why": why, "job": uuid.uuid4().hex, "member": vars(self.plane.member)}
        try:
            peers = Peers.of(dist.group.WORLD, device, what=what)  # a rank that is lost before it comes is named
            told: list[Any] = agreement.gather(peers, peers.store.under("members"), own, what)
            for of_rank in told:
                if of_rank["why"]:
                    raise RuntimeError(of_rank["why"])
        except BaseException:
            self.plane.close()
            raise
        self.plane.hooks.num_founders = len(told)
        self.plane.set_job(told[0]["job"])
        store = bounded_store.innermost_store(dist.group.WORLD)
        if dist.get_rank() == 0 and isinstance(store, dist.TCPStore):
            store.set(addresses.MET, self.address)
        self.enter(View(0, tuple(Member.from_json(of_rank["member"]) for of_rank in told), 0))


def _address_towards(near: Iterable[tuple[str, int]]) -> str:
    """This process's address on the way to the first of these places to which there is one: the name of a member that
    is lost may be gone. Its host's own address if there is none."""
    for place in near:
        with contextlib.suppress(OSError):
            return own_address.towards(*place)
    return numeric_host(None)


def _init_process_group() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"fusedcomm: Members(join='auto') begins training here, and {', '.join(missing)} is not set: start the "
            f"script with torchrun or `fusedcomm run --members`, call init_process_group first, or set {env.MEMBERS} "
            "to a member's address to join"
        )
    dist.init_process_group("gloo")
