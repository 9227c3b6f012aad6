"""What fusedcomm relies on in torch's process groups, against this torch's headers and libraries. `make test-torches`
runs this file with the oldest and the newest torch, too."""

import datetime
import mmap
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patience import HANG_S
from scripts import python

from fusedcomm.members.training.views import Views
from fusedcomm.native import _C
from fusedcomm.ranks import hosts, torch_groups
from fusedcomm.ranks.channels import make_host_channels
from fusedcomm.ranks.peers import Peers

TORCH = Path(torch.__file__).parent
HEADERS = "torch/csrc/distributed/c10d"
MINOR = tuple(map(int, torch.__version__.split(".")[:2]))
CUDA = torch.device("cuda", 0)
SECONDS = datetime.timedelta(seconds=7)


def test_this_torch_has_what_is_relied_on():
    assert torch_groups.missing(TORCH / "include") == []
    assert torch_groups.declares(TORCH / "include", *torch_groups.COMM_HOOK[:2])
    assert (TORCH / "include" / HEADERS / "nccl2").is_dir() == (MINOR >= (2, 14))


@pytest.mark.parametrize(("header", "name"), [("Types.hpp", "asyncOp"), ("Backend.hpp", "_allgather_base")])
def test_a_torch_that_lacks_something_is_named(tmp_path, header, name):
    for path in {row[0] for row in torch_groups.RELIED_ON if (TORCH / "include" / HEADERS / row[0]).is_file()}:
        (tmp_path / HEADERS / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TORCH / "include" / HEADERS / path, tmp_path / HEADERS / path)
    assert torch_groups.missing(tmp_path) == []
    (tmp_path / HEADERS / header).write_text((tmp_path / HEADERS / header).read_text().replace(name, "renamed"))
    lacking = torch_groups.missing(tmp_path)
    assert lacking and all(text.startswith(f"{header} has nothing that matches") and name in text for text in lacking)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without NCCL")
def test_the_library_has_the_collectives():
    wanted = [b"\0ncclAlltoAll\0", b"\0ncclAllGather\0", b"\0_ZN4c10d16ProcessGroupNCCL10getCommPtrEv\0"]
    if MINOR >= (2, 14):
        wanted.append(b"\0_ZN4c10d5nccl216ProcessGroupNCCL18getOperationStreamEb\0")
    with (
        open(TORCH / "lib/libtorch_cuda.so", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        assert [name for name in wanted if text.find(name) < 0] == []
    assert callable(dist.ProcessGroupNCCL.eager_connect_single_device)


def test_nccls_functions_are_found_in_torchs_library():
    """Also those of torch's that know its communicators; OWN_BACKEND calls one of them."""
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, SECONDS)
    why = _C.StreamTransport(gloo, torch.device("cpu"), nccl=_C.TORCHS_CUDA).why_through_torch
    found = "the group's backend is a c10d::ProcessGroupGloo"
    assert why == (f"{_C.TORCHS_CUDA} is not loaded" if torch.version.cuda is None else found)


UNCONNECTED = "the group has no communicator on this device"

OWN_BACKEND = """
import datetime, os, sys, torch, torch.distributed as dist
from fusedcomm.native import _C
from fusedcomm.ranks import groups, torch_groups
cuda, name = torch.device("cuda", 0), sys.argv[1]
torch_groups.BACKENDS["cuda"] += ("nccl-lazy",)
timeout = datetime.timedelta(seconds=7)
dist.init_process_group(f"cuda:{name}", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
try:
    groups.check_backend(dist.group.WORLD, cuda)
    backend = dist.group.WORLD._get_backend(cuda)
    transport = _C.StreamTransport(backend, torch.device("cpu"), nccl=_C.TORCHS_CUDA)
    timeout = groups.group_timeout(dist.group.WORLD, cuda)
    print("taken", type(backend).__name__, timeout, transport.why_through_torch)
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # without a GPU nccl2's destructor ends the process with an error
"""


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has no nccl2, or was built without NCCL")
@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("nccl2", {}, f"taken ProcessGroupNCCL2 0:00:07 {UNCONNECTED}"),
        ("nccl", {"TORCH_DIST_USE_NCCL2": "1"}, f"taken ProcessGroupNCCL2 0:00:07 {UNCONNECTED}"),
        ("nccl-lazy", {}, "ProcessGroupNCCLLazy, whose streams are not known"),
    ],
)
def test_torchs_own_backends_are_taken_or_refused_by_their_class(name, variables, words):
    """Torch makes each without a GPU, which only its first collective needs."""
    done = python("-c", OWN_BACKEND, name, **variables)
    assert words in done.stdout, done.stderr


class OldStandIn:
    """The part of ProcessGroupNCCL that fusedcomm uses, as CPU builds of torch do not have it. Records its calls."""

    calls: list = []

    class Options:
        def __init__(self):
            self._timeout = None
            self.config = SimpleNamespace(max_ctas=None, blocking=None)

    def __init__(self, store, rank, size, options):
        self.timeout, self.max_ctas = options._timeout, options.config.max_ctas
        self.blocking = options.config.blocking
        self.calls.append(("made", rank, size))

    def eager_connect_single_device(self, device):
        self.calls.append(("connected", device))


@pytest.fixture
def nccl(monkeypatch):
    """A torch whose NCCL backend is the stand-in."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", OldStandIn, raising=False)
    monkeypatch.setattr(OldStandIn, "calls", [])
    return monkeypatch


def test_a_class_that_was_not_read_is_refused(nccl):
    torch_groups.refuse_unread(OldStandIn(None, 0, 1, OldStandIn.Options()))
    torch_groups.refuse_unread(SimpleNamespace(wrapped_pg=OldStandIn(None, 0, 1, OldStandIn.Options())))
    with pytest.raises(RuntimeError, match=r"is a types\.SimpleNamespace, whose streams .* TORCH_DIST_USE_NCCL2=0"):
        torch_groups.refuse_unread(SimpleNamespace())
    nccl.delattr(dist, "ProcessGroupNCCL")
    with pytest.raises(RuntimeError, match=r"has no torch\.distributed\.ProcessGroupNCCL, .* Config\(hosts=None\)"):
        torch_groups.own_nccl(dist.HashStore(), "local/0", 0, 1, SECONDS, CUDA)


def test_torchs_watchdog_leaves_a_communicator_alone_whose_ranks_come_and_go(nccl):
    made = []

    class Reading(OldStandIn):
        def __init__(self, *arguments):
            made.append([os.environ.get(name) for name in torch_groups._UNSUPERVISED])
            super().__init__(*arguments)

    nccl.setattr(dist, "ProcessGroupNCCL", Reading)
    nccl.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    nccl.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before = dict(os.environ)
    for is_supervised in (True, False):
        torch_groups.own_nccl(dist.HashStore(), "members", 0, 1, SECONDS, CUDA, is_supervised=is_supervised)
    assert made == [["3", None, before.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")], ["0", "0", "0"]]
    assert dict(os.environ) == before


def test_a_communicator_that_does_not_connect_leaves_nothing_behind(nccl):
    may_end, has_aborted = threading.Event(), threading.Event()

    class Refusing(OldStandIn):
        def eager_connect_single_device(self, device):
            raise RuntimeError("a rank is lost")

        def abort(self):
            has_aborted.set()

    class Waiting(Refusing):
        def eager_connect_single_device(self, device):
            may_end.wait(HANG_S)

    nccl.setattr(dist, "ProcessGroupNCCL", Refusing)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        torch_groups.own_nccl(dist.HashStore(), "members", 0, 1, SECONDS, CUDA)
    assert has_aborted.is_set()
    has_aborted.clear()
    nccl.setattr(dist, "ProcessGroupNCCL", Waiting)
    at_once = datetime.timedelta(milliseconds=20)
    with pytest.raises(RuntimeError, match=r"'members' within 0\.02 s, although all its ranks had come"):
        torch_groups.own_nccl(dist.HashStore(), "members", 0, 1, at_once, CUDA)
    may_end.set()
    assert has_aborted.wait(HANG_S)


def test_a_rank_that_never_comes_is_named_before_anything_is_made(nccl):
    store = dist.HashStore()
    store.set("members/here/1", "")
    at_once = datetime.timedelta(milliseconds=20)
    with pytest.raises(RuntimeError, match=r"rank 0 of 4 .* 0\.02 s rank\(s\) \[2, 3\] of these 4 did not"):
        torch_groups.own_nccl(store, "members", 0, 4, at_once, CUDA)
    assert OldStandIn.calls == []


def gives_up_with_a_lost_rank(errand, may_give_up):
    def lost(*_):
        may_give_up.wait(HANG_S)
        raise RuntimeError("rank 1 is lost")

    peers = SimpleNamespace(world_size=2, _poll_s=0.01, _raise_if_lost=lost)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        Peers.call(peers, errand, "connecting")


def gives_up_a_view_of_members(errand, may_give_up):
    def is_superseded(view):
        return may_give_up.wait(HANG_S)

    members = SimpleNamespace(group=lambda view, device: errand())
    views = SimpleNamespace(members=members, device=CUDA, _is_superseded=is_superseded, _make_session=print)
    assert Views._build(views, None) is None


@pytest.mark.parametrize("gives_up", [gives_up_with_a_lost_rank, gives_up_a_view_of_members])
@pytest.mark.parametrize("others", ["never come", "have come"])
def test_no_thread_waits_for_ranks_once_the_communicator_is_given_up(nccl, gives_up, others):
    """Only NCCL's own, which ends the communicator when it returns."""
    may_give_up, may_end, has_aborted, threads = threading.Event(), threading.Event(), threading.Event(), []

    class Waiting(OldStandIn):
        def eager_connect_single_device(self, device):
            may_give_up.set()
            may_end.wait(HANG_S)

        def abort(self):
            has_aborted.set()

    def connect():
        threads.append(threading.current_thread())
        if others == "never come":
            may_give_up.set()
        torch_groups.own_nccl(store, "members", 0, 2, datetime.timedelta(days=1), CUDA)

    nccl.setattr(dist, "ProcessGroupNCCL", Waiting)
    store = dist.HashStore()
    if others == "have come":
        store.set("members/here/1", "")
    gives_up(connect, may_give_up)
    threads[0].join(HANG_S)
    assert not threads[0].is_alive()
    may_end.set()
    assert others == "never come" or has_aborted.wait(HANG_S)


BY_NCCL = -(2**31)
"""NCCL's number for what nobody has chosen."""


@pytest.mark.parametrize(
    ("blocking", "variable", "expected"),
    [(BY_NCCL, "", False), (BY_NCCL, "1", True), (1, "1", False), (0, "", True), (None, "1", True), (None, "0", False)],
)
def test_a_group_is_non_blocking_as_torch_decides(monkeypatch, blocking, variable, expected):
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", variable)
    config = None if blocking is None else SimpleNamespace(blocking=blocking)
    backend = SimpleNamespace(options=SimpleNamespace(config=config))
    assert torch_groups.is_non_blocking(backend) == expected
    assert torch_groups.is_non_blocking(SimpleNamespace(wrapped_pg=backend)) == expected


class GroupOfSix:
    """A process group with the only parts that channels use: a backend with a timeout and a rank."""

    class options:
        _timeout = SECONDS

    def _get_backend(self, device):
        return self

    def rank(self):
        return 4


def test_communicators_of_two_levels_are_connected_at_attach(nccl):
    """A communicator connects when all its ranks do, so every rank connects them in the same order: inside the host,
    between hosts, inside it again. Each wire stream has one, and all together fit onto a small GPU."""
    nccl.setattr(torch_groups, "_missing", lambda *arguments: [])  # the others come at once
    two_of_three = hosts.checked([[0, 1, 2], [3, 4, 5]], 6)
    channels = make_host_channels(GroupOfSix(), CUDA, dist.HashStore(), two_of_three)
    made = [("made", 1, 3), ("made", 1, 2)]
    connected = ("connected", CUDA)
    assert OldStandIn.calls == [made[0], connected, made[1], connected, made[0], connected]
    wires = [channels.local_scatter, channels.cross_scatter, channels.local_gather]
    assert channels.cross_scatter is channels.cross_gather and channels.local_scatter is not channels.local_gather
    assert {wire.timeout for wire in wires} == {SECONDS} and [wire.max_ctas for wire in wires] == [16, 8, 16]
    assert {wire.blocking for wire in wires} == {1}  # whatever torch's own communicators are
