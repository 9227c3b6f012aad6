"""The engine's CUDA path without a GPU: the launcher against a driver that records and runs each launch.

Its kernels are interpreted; test_engine_on_ptx.py has compiled ones, and test_cuda_streams.py has streams.
"""

import itertools
import pickle
import threading
import time

import fake_cuda
import pytest
import torch
from front_ends import FRONT_ENDS
from models import Gradients, refusal, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.ddp import handle
from fusedcomm.devices import cuda
from fusedcomm.native import _C

pytest.importorskip("triton", reason="the CUDA path's kernels are Triton's")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/devices/test_cuda.py runs the same on it"),
]


@pytest.fixture
def fake(library):
    fake = fake_cuda.gpu(library)
    yield fake
    fake.fail("", 0)


# --- which kernels there are -----------------------------------------------------------------------------------------


def test_kernels_for_two_levels_are_prepared_only_if_sums_have_them():
    one, two, asked_for = (
        set(cuda.kernel_variants(Config("int8", hosts=hosts), 4, [torch.float32], two_levels))
        for hosts, two_levels in (("auto", None), ("auto", True), (2, None))
    )
    assert one < two == asked_for


def test_a_kernels_key_has_what_matters_to_it():
    key = _C.KernelKey("pack", "bf16", 64, torch.float16, in_wire="fp32", feedback=True)
    # bf16 has no blocks, and pack sums nothing.
    assert key == _C.KernelKey("pack", "bf16", 256, torch.float16, feedback=True)
    assert key != _C.KernelKey("pack", "bf16", 64, torch.float16)
    assert (key.wire, key.grad_dtype, key.in_wire, key.feedback) == ("bf16", torch.float16, None, True)
    reduce = _C.KernelKey("reduce", "int4", 32, in_wire="bf16")
    assert (reduce.block, reduce.grad_dtype, reduce.in_wire) == (32, None, "bf16")
    assert reduce != _C.KernelKey("reduce", "int4", 64, in_wire="bf16")
    for each in (key, reduce, _C.KernelKey("scale")):
        copy = pickle.loads(pickle.dumps(each))
        assert (copy, hash(copy), repr(copy)) == (each, hash(each), repr(each))
    with pytest.raises(ValueError, match="kernel unpack needs a gradient dtype"):
        _C.KernelKey("unpack", "bf16")
    with pytest.raises(ValueError, match="kernel pack needs a wire"):
        _C.KernelKey("pack", grad_dtype=torch.float32)
    with pytest.raises(ValueError, match="no kernel is called 'sort'"):
        _C.kernel_params("sort")


# --- what can go wrong ----------------------------------------------------------------------------------------------


def faulting(rank, world_size, library):
    fake = fake_cuda.gpu(library)
    ddp = DistributedDataParallel(Gradients((3000,)))
    with fake.takes_over(Config("bf16")):
        fusedcomm.attach(ddp, Config("bf16", sum="two-shot"))
        synchronize(ddp, [torch.ones(3000)])
        fake.fail("cuLaunchKernel", 700)
        try:
            synchronize(ddp, [torch.ones(3000)])
        except RuntimeError as error:
            return str(error)
    return None


def test_a_kernel_that_faults_is_an_error_with_the_buckets_name(ranks, library):
    (error,) = ranks.run(faulting, library, world_size=1)
    assert "the pack of chunk 1/1 failed for bucket 0 (weights.0; 1 parameters" in error
    assert "cuLaunchKernel failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)" in error
    assert "FUSEDCOMM_SYNC=1 finds the stage" in error


def with_the_gil_under_the_lock(rank, world_size, library):
    """The calls that another thread ended while a launch, within the hook's call, waited for the GIL."""
    fake = fake_cuda.gpu(library)
    entered, own_run, ended = threading.Event(), fake._run, []

    def run(*args):
        entered.set()
        # Releases the GIL and then waits for it, as a collective does for the flight recorder.
        time.sleep(0.2)
        own_run(*args)

    with fake.takes_over(Config("bf16")):
        ddp = DistributedDataParallel(Gradients((3000,)))
        comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"))
        hook = comm.session.synchronizer

        def call():
            entered.wait()
            for binding in (
                hook.engine.start_trace,
                hook.engine.stop_trace,
                hook.stats,
                hook.buckets,
                hook.take_notices,
            ):
                binding()
                ended.append(binding.__name__)
            hook.max_over_ranks(1.0, "a value")  # waits for the lock that the hook's call holds
            ended.append("max_over_ranks")

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        fake._run = run
        try:
            synchronize(ddp, [torch.ones(3000)])
        finally:
            fake._run = own_run
        thread.join()
        comm.detach()
    return ended


def test_nobody_waits_for_the_engine_with_the_gil_in_hand(ranks, library):
    (ended,) = ranks.run(with_the_gil_under_the_lock, library, world_size=1)
    assert ended == ["start_trace", "stop_trace", "stats", "buckets", "take_notices", "max_over_ranks"]


def captured(rank, world_size, library, is_watched):
    """Runs the hook under capture, and then a step.

    Returns (the error under capture, (launches, reported passes, observed passes) by then, the step's gradient, the
    passes observed in the step).
    """
    fake = fake_cuda.gpu(library)
    ddp = DistributedDataParallel(Gradients((3000,)))
    begun = []
    with fake.takes_over(Config("bf16")):
        comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"))
        target = handle.targets[ddp]
        if is_watched:  # as while config="auto" searches
            target.observer.watch(comm.session.native_device, lambda: begun.append(len(fake.launches)), times=True)
        (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
        with fake.capturing(), pytest.raises(RuntimeError) as raised:
            ddp.reducer._run_comm_hook(bucket).wait()
        done = len(fake.launches), len(begun), len(target.observer.take_pass_ends())
        (seen,) = synchronize(ddp, [torch.full((3000,), 3.0)])
        num_seen = len(target.observer.take_pass_ends())
        comm.detach()
    return str(raised.value), done, seen.unique().tolist(), num_seen


@pytest.mark.parametrize("is_watched", [False, True], ids=["alone", "searching"])
def test_a_captured_step_is_refused_before_anything_is_done(ranks, library, is_watched):
    ((error, done, gradient, num_seen),) = ranks.run(captured, library, is_watched, world_size=1)
    assert "captured into a CUDA graph" in error
    assert done == (0, 0, 0)
    assert gradient == [3.0] and num_seen == int(is_watched)


def captured_pass(rank, world_size, library, name):
    """The error of a backward pass under capture, and the launches by then."""
    fake = fake_cuda.gpu(library)
    with fake.takes_over(Config("bf16")):
        forward, comm = FRONT_ENDS[name].make(Gradients((3000,)), Config("bf16"))
        loss = forward([torch.ones(3000)])
        with fake.capturing():
            said = refusal(loss.backward)
        return said, len(fake.launches)


@pytest.mark.parametrize("name", ["reducer", "DataParallel", "FSDP2"])
def test_a_captured_pass_is_refused_before_anything_is_launched(ranks, library, name):
    for said, launches in ranks.run(captured_pass, library, name, world_size=2):
        assert "captured into a CUDA graph" in said and launches == 0


def test_a_missing_driver_is_named():
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libno-such-cuda.so: cannot open .* need an NVIDIA driver"):
        _C.CudaDriver("libno-such-cuda.so")
    with pytest.raises(RuntimeError, match=r"libm.so.6 has no cuInit"):
        _C.CudaDriver("libm.so.6")


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_cubin_that_does_not_load_is_an_error(fake, call):
    fake.fail(call, 209)
    with pytest.raises(RuntimeError, match=rf"{call} failed with CUDA_ERROR_OF_THE_TEST \(209\).* driver may be older"):
        fake.loader(Config(), 3, (torch.float32,))


def loaded_by_attaching(rank, world_size, library):
    """The number of modules loaded by attaching, by attaching again, with another wire, and in another context.

    Checks that launches work.
    """
    fake = fake_cuda.gpu(library)
    ddp = DistributedDataParallel(Gradients((3000,)))
    numbers = [fake.library.fake_num_loads()]
    for wire, context in (("bf16", 11), ("bf16", 11), ("int8", 11), ("bf16", 12)):  # contexts of no other test
        fake.library.fake_set_context(context)
        with fake.takes_over(Config(wire)):
            comm = fusedcomm.attach(ddp, Config(wire, sum="two-shot", wires={"1d": wire}))
            (seen,) = synchronize(ddp, [torch.full((3000,), 3.0)])
            comm.detach()
        assert (seen - 3).abs().max() < 1e-2 and fake.launches
        numbers.append(fake.library.fake_num_loads())
    fake.library.fake_set_context(1)
    return [later - earlier for earlier, later in itertools.pairwise(numbers)]


def test_a_kernel_is_loaded_once_in_a_context(ranks, library):
    ((first, again, other_wire, other_context),) = ranks.run(loaded_by_attaching, library, world_size=1)
    assert first > 1 and again == 0 and other_context == first
    assert other_wire == first - 3  # all except those of exact sums: scale, pack and unpack


def test_kernels_of_another_version_are_refused(fake):
    from fusedcomm.kernels import variants

    variant = variants.engine_variants([("bf16", 128)], (torch.float32,))[0]
    compiled = variants.Compiled(variant, "pack", b"", "", 16, 0, ("ptr", "i32"), 1)
    with pytest.raises(RuntimeError, match=r"kernel pack was compiled with parameters \('ptr', 'i32'\)"):
        cuda.load(_C.KernelLoader(fake.driver, 1024), compiled)


def test_an_old_gpu_is_named_with_what_is_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(RuntimeError, match=r"Tesla V100 has compute capability 7.0; 7.5 or later is supported"):
        cuda.check_capability(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert cuda.check_capability(torch.device("cuda")) == 90


def test_a_triton_of_unknown_convention_is_named(monkeypatch, fake):
    import triton

    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.raises(RuntimeError, match=r"Triton 4.0.0 is not supported: use 3.6 to 3.9"):
        cuda.load_kernels(fake.driver, Config(), 3, [torch.float32], 90, announce=False)
