"""``fusedcomm.Members``: ranks that come and go while training runs."""

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm import env, log
from fusedcomm.config import check
from fusedcomm.members import addresses
from fusedcomm.members.control import ControlPlane, new_uid
from fusedcomm.members.view import Decision, Member, View
from fusedcomm.ranks import groups, torch_groups
from fusedcomm.ranks.own_group import OwnGroup

PROGRESS = "progress"
"""The kind of request that asks a member for its last finished step."""
_POLL_S = 0.02
LEAVE_TIMEOUT_S = 60.0
"""Seconds that a rank which leaves waits for the others to finish its last step."""
INSTALL_TIMEOUT_S = 1800.0
"""Seconds that the members of a new view wait for the last of them, which may be in a long forward pass."""


class Members:
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
            members/addresses.py. A process that begins calls ``init_process_group("gloo")`` then, unless it was called.
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

    Attributes:
        plane: how the members agree, for fusedcomm itself.
    """

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
            raise ValueError(
                f"fusedcomm: min_ranks={min_ranks} is not possible with {dist.get_world_size()} ranks: start more"
            )
        self.min_ranks, self.microbatches, self.joins = min_ranks, microbatches, join
        timeout = dist.default_pg_timeout
        if join is None:
            with contextlib.suppress(RuntimeError):  # it has no backend for cpu
                timeout = groups.group_timeout(dist.group.WORLD, torch.device("cpu"))
        near = addresses.split(join.split(",")[0]) if join is not None else groups.store_address(dist.group.WORLD)
        own_host = host or _host_towards(near)
        self._store = dist.TCPStore(
            own_host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60)
        )
        info = {
            "store": [own_host, self._store.port],
            "process": groups.describe_own_process(),
            "timeout_s": timeout.total_seconds(),
        }
        job = None if join is not None else self._common_job()
        self.plane = ControlPlane(new_uid(), info, min_ranks=min_ranks, job=job, silence_s=silence, host=own_host)
        self._noted: set[str] = set()
        if self._file is not None:
            self._file.note([], "")  # fails now if it will
        self._current: View | None = None
        self._callbacks: list[Callable[[Decision], object]] = []
        self.carried: dict[str, Any] = {}
        self.training: Any = None
        """The training whose ranks these are (training.py); None before a reducer is made."""
        self.num_microbatches = 0
        """Microbatches, or without `microbatches` batches, of all ranks in all steps that have ended: times the size of
        one, the place in the data."""
        self.portion = (0, 1)
        """(first, count): this rank's microbatches of the present step among those of all ranks."""
        self.weighs = True
        """Whether this rank's microbatches count, where their number is kept."""
        if join is None:
            self._found()

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
        """Steps that have ended: synchronized backward passes, those before this process joined included."""
        return 0 if self.training is None else self.training.step

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
            TypeError: an object has no ``state_dict()`` or no ``load_state_dict()``.
        """
        for name, carried in objects.items():
            if not callable(getattr(carried, "state_dict", None)) or not callable(
                getattr(carried, "load_state_dict", None)
            ):
                raise TypeError(f"fusedcomm: carry({name}=…) needs an object with state_dict() and load_state_dict()")
        if self.training is None:
            raise RuntimeError(
                "fusedcomm: members.carry() comes after the reducer: give members= to DataParallel or GradReducer first"
            )
        for name, carried in objects.items():
            self.carried[name] = carried
            self.training.receive(name, carried)

    def leave(self, reason: str = "it has left") -> None:
        """Tells the others that this process goes; they go on without it at once. Idempotent.

        Before, it waits until they have finished this rank's last step, at most a minute: they may need its means.
        """
        if self.training is not None and self._current is not None:
            self.wait_for_others(LEAVE_TIMEOUT_S)
        self.plane.leave(reason)

    # ---- for fusedcomm itself

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
        is_host = first.uid == own.uid
        timeout = datetime.timedelta(seconds=60)
        store = self._store if is_host else dist.TCPStore(host, port, is_master=False, timeout=timeout)
        of_view = dist.PrefixStore(f"view/{view.number}", store)
        rank, size = view.rank_of(own.uid), len(view.members)
        backends = {"cpu": groups.gloo_backend_over(of_view, "members", rank, size, own_timeout)}
        if device.type == "cuda":
            nccl = torch_groups.own_nccl(of_view, "members", rank, size, own_timeout, device, is_supervised=False)
            backends["cuda"] = nccl
        return OwnGroup(of_view, rank, size, own_timeout, backends)

    def wait_for_others(self, timeout_s: float, is_enough: Callable[[dict], bool] | None = None) -> None:
        """Waits until the others are as far as this rank, or are gone; at most so long.

        is_enough: of what a member says of its progress. None: it has finished this rank's last step.
        """
        is_enough = is_enough or (lambda told: told["finished"] >= self.step - 1)
        until = time.monotonic() + timeout_s
        for member in self.current.members:
            with contextlib.suppress(RuntimeError, LookupError):  # it is lost, or has left
                while member.uid != self.plane.member.uid and time.monotonic() < until:
                    if is_enough(self.plane.request(member, PROGRESS, {})[0]):
                        break
                    time.sleep(_POLL_S)

    def _common_job(self) -> str:
        """A text that the ranks that begin have in common, and no other job. RuntimeError, on all, if another runs."""
        self._start = groups.private_store(dist.group.WORLD).under("members")
        if dist.get_rank() == 0:
            why = ""
            try:
                if self._file is not None:
                    addresses.refuse_a_running_job(self._file)
            except RuntimeError as error:
                why = str(error)
            self._start.set("job", json.dumps({"job": uuid.uuid4().hex, "why": why}))
        told = json.loads(self._start.get("job"))
        if told["why"]:
            raise RuntimeError(told["why"])
        return told["job"]

    def _found(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._start.set(str(rank), json.dumps(self.plane.member.to_json()))
        told = [json.loads(self._start.get(str(other))) for other in range(size)]
        store = groups.innermost_store(dist.group.WORLD)
        if rank == 0 and isinstance(store, dist.TCPStore):
            store.set(addresses.MET, self.address)
        self.enter(View(0, tuple(Member.from_json(one) for one in told), 0))


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """(first, count) of rank `rank` among `total` pieces: the first ranks have one more if they cannot be divided."""
    count, more = divmod(total, size)
    return rank * count + min(rank, more), count + (rank < more)


def _init_process_group() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"fusedcomm: Members(join='auto') begins training here, and {', '.join(missing)} is not set: start the "
            f"script with torchrun or `fusedcomm run --members`, call init_process_group first, or set {env.MEMBERS} "
            "to a member's address to join"
        )
    dist.init_process_group("gloo")


def _host_towards(near: tuple[str, int] | None) -> str:
    """The address of the interface that leads there; nothing is sent."""
    if near is None:
        return socket.gethostbyname(socket.gethostname())
    family, *_, address = socket.getaddrinfo(*near, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
