"""``fusedcomm.attach`` and its handle."""

import copy
import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from models import Gradients, error_of, integers, mean_of_integers, synchronize, threads_of_engine
from scripts import printed_by_two_ranks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

# --- arguments ------------------------------------------------------------------------------------------------------


def test_a_copied_comm_state_does_not_forget_its_module_in_silence():
    state = fusedcomm.CommState(Config(wires={"0.weight": "fp32"}), module=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="is a copy, which has no module"):
        copy.deepcopy(state).session(torch.device("cpu"))


def test_a_comm_states_repr_is_one_line():
    state = fusedcomm.CommState(Config("int8", sum="two-shot"), module=torch.nn.Linear(2, 2))
    assert repr(state) == "<fusedcomm.CommState: wire int8, sum two-shot, no backward pass yet>"
    assert repr(copy.copy(state)).endswith("sum two-shot, a copy without its module>")


def test_an_environment_variable_out_of_range_is_named(monkeypatch):
    from fusedcomm import config

    monkeypatch.setenv("FUSEDCOMM_CODEC_THREADS", "many")
    with pytest.raises(ValueError, match="FUSEDCOMM_CODEC_THREADS='many'"):
        config.choose_codec_threads(None, 2)
    monkeypatch.setenv("FUSEDCOMM_CODEC_THREADS", "1000")
    with pytest.raises(ValueError, match="FUSEDCOMM_CODEC_THREADS=1000 is not possible: use a whole number from 1 to"):
        config.choose_codec_threads(None, 2)
    monkeypatch.setenv("FUSEDCOMM_ISA", "sse9")
    with pytest.raises(ValueError, match="FUSEDCOMM_ISA='sse9' is not known: use one of 'auto'"):
        config.choose_isa(None)
    monkeypatch.setenv("FUSEDCOMM_CODEC_THREADS", "3")
    assert config.choose_codec_threads(None, 2) == 3
    assert config.choose_codec_threads(1, 2) == 1


def trained_with_other_options(rank, world_size, of_ranks):
    ddp = DistributedDataParallel(Gradients((128, 64), (9,)), **of_ranks[rank])
    fusedcomm.attach(ddp, "fp32", quiet=True)
    return synchronize(ddp, [integers(rank, (128, 64)), integers(rank, (9,))], steps=4)


@pytest.mark.parametrize(
    "of_ranks",
    [
        ({"gradient_as_bucket_view": True}, {}),
        ({"bucket_cap_mb": 0.01}, {"bucket_cap_mb": 1}),
        ({"static_graph": True}, {"static_graph": True, "bucket_cap_mb": 0.01}),
        ({"broadcast_buffers": False}, {}),  # the model has no buffers
    ],
    ids=str,
)
def test_options_of_ddp_that_change_nothing_for_other_ranks_may_differ(ranks, of_ranks):
    for means in ranks.run(trained_with_other_options, of_ranks, world_size=2):
        assert all(torch.equal(mean, mean_of_integers(2, mean.shape)) for mean in means)


# --- the handle -----------------------------------------------------------------------------------------------------


def handle_life(rank, world_size):
    ddp = DistributedDataParallel(Gradients((128, 64), (9,)))
    comm = fusedcomm.attach(ddp, "int8")
    gradients = [integers(rank, (128, 64)), integers(rank, (9,))]
    predicted = str(comm.plan())
    synchronize(ddp, gradients, steps=5)
    return predicted, comm.stats(), comm.plan()


def test_stats_and_plan_count_what_is_sent(ranks):
    for predicted, stats, plan in ranks.run(handle_life, world_size=2):
        assert "wire int8" in predicted and "weights.1" in predicted and "buckets as they are expected" in predicted
        assert stats.steps == stats.buckets == 5
        assert stats.grad_nbytes == 5 * 4 * (128 * 64 + 9)
        # In each step a rank sends 8192 codes, 64 scales and 16 exact floats, 9 and their padding, once. From the
        # second step on the 9 come first: a hole of one element puts the others at an aligned place, which takes a
        # block more and 12 bytes behind the scales.
        first, more = 8192 + 4 * 64 + 4 * 16, 128 + 4 + 12
        assert stats.sent_nbytes == 5 * first + 4 * more
        assert stats.wire_ratio == pytest.approx(0.26, abs=0.01)
        assert stats.exposed_ms_p50 > 0 and stats.busy_ms.p50 >= stats.exposed_ms_p50 and 0 <= stats.overlap < 1
        assert not plan.predicted and len(plan.buckets) == 1 and plan.exempt == ("weights.1",)
        assert plan.sent_nbytes == first + more


def after_detach(rank, world_size, wire):
    ddp = DistributedDataParallel(Gradients((128, 64), (9,)))
    gradients = [integers(rank, (128, 64)), integers(rank, (9,))]
    comm = fusedcomm.attach(ddp, wire, quiet=True)
    synchronize(ddp, gradients, steps=2)
    state, attached = comm.state_dict(), comm.plan()
    comm.detach()
    comm.detach()
    errors = []
    for call in (lambda: comm.load_state_dict(state), lambda: comm.trace("trace.json"), comm.__enter__):
        errors.append(error_of(RuntimeError, call))
    assert comm.state_dict() == state and comm.stats().steps in (0, 2) and comm.nonfinite_report() == []
    seen = synchronize(ddp, gradients)
    again = fusedcomm.attach(ddp, "fp32", quiet=True)
    seen += synchronize(ddp, gradients)
    return attached, comm.plan(), errors, seen, again.stats().buckets


@pytest.mark.parametrize("wire", ["int8", "auto"])
def test_a_detached_handle_does_not_read_as_if_it_were_attached_and_ddp_may_be_attached_again(ranks, wire):
    for attached, detached, errors, seen, buckets in ranks.run(after_detach, wire, world_size=2):
        assert not attached.detached and "detached" not in str(attached)
        assert detached.detached and detached.off and detached.exempt == ()
        first, *table = str(detached).splitlines()
        assert first == "fusedcomm: detached, DDP's own exact all-reduce, 2 ranks"
        assert "int8" not in str(detached) and "auto" not in str(detached)
        assert detached.buckets[0].sum == "exact" and "weights.1" in table[1]
        assert all("this handle is detached" in text and "call fusedcomm.attach again" in text for text in errors)
        assert all(torch.equal(mean, mean_of_integers(2, mean.shape)) for mean in seen) and buckets == 1


# --- no allocation in a steady state --------------------------------------------------------------------------------

COUNTER_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
static atomic_long counted;
long fc_large_allocations(void) { return counted; }
static void count(size_t nbytes) { if (nbytes >= 4096) counted++; }
void* malloc(size_t n) { static void* (*f)(size_t); if (!f) f = dlsym(RTLD_NEXT, "malloc"); count(n); return f(n); }
void* aligned_alloc(size_t a, size_t n) {
  static void* (*f)(size_t, size_t); if (!f) f = dlsym(RTLD_NEXT, "aligned_alloc"); count(n); return f(a, n); }
int posix_memalign(void** p, size_t a, size_t n) {
  static int (*f)(void**, size_t, size_t);
  if (!f) f = dlsym(RTLD_NEXT, "posix_memalign");
  count(n); return f(p, a, n); }
"""

COUNTING_SCRIPT = r"""
import ctypes, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import fusedcomm
from models import Gradients

def noop(state, bucket: dist.GradBucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

def large_allocations(wire):
    count = ctypes.CDLL(None).fc_large_allocations
    ddp = DistributedDataParallel(Gradients((700, 800)), gradient_as_bucket_view=True)
    gradient = torch.ones(700, 800)
    torch.empty(1 << 20)
    assert count() > 0, "the counter counts nothing"
    comm = None
    if wire == "noop":
        ddp.register_comm_hook(None, noop)
    elif wire != "default":
        comm = fusedcomm.attach(ddp, fusedcomm.Config(wire, sum="auto" if wire == "fp32" else "two-shot"))
    # The gradient keeps its memory, so that only the hook's allocations are counted.
    def step():
        ddp.zero_grad(set_to_none=False)
        ddp([gradient]).backward()
    for _ in range(20):
        step()
    before = count()
    for _ in range(20):
        step()
    counted = count() - before
    dist.barrier()
    if comm is not None:
        comm.detach()
    return counted

rank, store, *wires = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
for wire in wires:
    print("LARGE", large_allocations(wire), flush=True)
# torch 2.13 aborts if a gloo thread releases DDP's own all-reduce while the interpreter finalizes.
os._exit(0)
"""


@pytest.fixture(scope="module")
def allocation_counter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTER_SOURCE)
    library = folder / "counter.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", str(folder / "counter.c"), "-o", str(library), "-ldl"], check=True
    )
    return library


def count_large_allocations(library, folder, *wires: str) -> dict[str, int]:
    """{wire: allocations of 4 KiB or more in 20 steady steps, on the rank with more of them}, for two ranks."""
    printed = printed_by_two_ranks(COUNTING_SCRIPT, folder, *wires, LD_PRELOAD=str(library))
    counts = zip(*([int(count) for count in out.split("LARGE")[1:]] for out in printed), strict=True)
    return dict(zip(wires, map(max, counts), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="counts allocations with LD_PRELOAD")
def test_a_steady_step_allocates_no_more_than_a_hook_that_does_nothing(allocation_counter, tmp_path):
    # gloo's queues sometimes grow, twice in 200 steps, also without a hook. An allocation in every step would count 20.
    now_and_then = 3
    counted = count_large_allocations(allocation_counter, tmp_path, "noop", "bf16", "int8", "default", "fp32")
    assert max(counted[wire] for wire in ("bf16", "int8")) <= counted["noop"] + now_and_then, counted
    # gloo's all-reduce allocates. The exact wire adds no allocation to those without a hook.
    assert counted["fp32"] <= counted["default"] + now_and_then, counted


# --- lifetime -------------------------------------------------------------------------------------------------------


def lifetimes(rank, world_size):
    gc.collect()  # engines of tests before this one, in cycles
    before = threads_of_engine()
    ddp = DistributedDataParallel(Gradients((40, 40)))
    comm = fusedcomm.attach(ddp)
    synchronize(ddp, [torch.ones(40, 40)])
    during = threads_of_engine()
    comm.detach()
    return before, during, threads_of_engine(), threading.active_count()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_detach_ends_the_threads(ranks):
    for before, during, after, _ in ranks.run(lifetimes, world_size=2):
        assert during == before + 3 + 1 and after == before  # three lanes that compute, and the watch


FORGETTING_SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import fusedcomm
from fusedcomm.native import _C
from scripts import let_threads_be_late

rank, store, wire = sys.argv[1:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(6)]), bucket_cap_mb=1)
if wire == "off":  # as config="auto" leaves buckets to DDP's own all-reduce
    _C.register_ddp_hook(ddp.reducer, _C.HookSwitch(ddp.process_group))
else:
    fusedcomm.attach(ddp, wire)
for step in range(3):
    if step == 2:
        let_threads_be_late()
    ddp(torch.ones(2, 400)).sum().backward()
print("trained")
"""


@pytest.mark.sampled(by=lambda wire: {})  # make test runs one of these cases
@pytest.mark.alone  # late threads get hardly any time on a core that other programs use
@pytest.mark.skipif(sys.platform != "linux", reason="delays threads as Linux does")
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "off"])
def test_ranks_that_forget_to_detach_end_well_while_threads_are_late(tmp_path, wire):
    for printed in printed_by_two_ranks(FORGETTING_SCRIPT, tmp_path, wire):
        assert printed == "trained\n"
