"""What holds for every front end beside its gradients (test_like_ddp.py): it does not heed torch's default dtype, calls
nothing of torch by a deprecated name, and a copy of its handle is attached to nothing. FSDP2's state, in inference
mode."""

import ast
import copy
import re
import warnings

import on_streams
import pytest
import torch
from checkpoints import file_of, read
from front_ends import FRONT_ENDS, end
from models import Gradients, integers, mean_of_integers, refusal
from sampling import few
from scripts import ROOT

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Config, Feedback
from fusedcomm.simulation import simulate

MAKERS = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn"),
    *("range", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch that take the default dtype, or perhaps do, unless they are given one."""


def without_dtype(source: str) -> list[int]:
    """The lines of a Python source in which a tensor is made without a dtype."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and (node.func.attr == "Tensor" or node.func.attr in MAKERS)
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    ]


def without_options(source: str) -> list[int]:
    """The same of a C++ source: the arguments name neither a dtype nor options, which need a dtype themselves."""
    found = []
    named = "|".join(["at::k[A-Z]", "[oO]ptions", *re.findall(r"(\w+) = at::TensorOptions\(\)\.dtype\(", source)])
    for call in re.finditer(rf"\b(?:at|torch)::({'|'.join(MAKERS)}|from_blob)\(|\bTensorOptions\(\)", source):
        end, depth = call.end(), 1
        while call[1] and depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        has_dtype = re.search(named, source[call.end() : end])
        if not (has_dtype if call[1] else source.startswith(".dtype(", end)):
            found.append(source.count("\n", 0, call.start()) + 1)
    return found


@pytest.mark.parametrize(
    ("folder", "suffix", "lines"),
    [("fusedcomm", ".py", without_dtype), ("kernels", ".py", without_dtype), ("csrc", ".[ch]*", without_options)],
)
def test_no_tensor_is_made_without_a_dtype(folder, suffix, lines):
    sources = [path for path in (ROOT / folder).rglob(f"*{suffix}") if path.is_file()]
    assert len(sources) > 10
    found = [f"{path.relative_to(ROOT)}:{line}" for path in sources for line in lines(path.read_text())]
    assert not found, f"{', '.join(found)}: give a dtype, or the user's default applies"


def test_calls_without_a_dtype_are_found():
    python = "torch.empty(3)\ntorch.zeros(3, dtype=x)\nf(torch.tensor([1.0], device=d))\nx.new_empty(3)"
    assert without_dtype(python) == [1, 3]
    cpp = "at::empty({n});\nat::full({1}, 2, at::kDouble);\nat::zeros(f(x), y.options());\nTensorOptions().device(d);"
    assert without_options(cpp) == [1, 4]


# --- front ends -----------------------------------------------------------------------------------------------------

SHAPES = ((96, 64), (64,))


def model() -> Gradients:
    return Gradients(*SHAPES, dtype=torch.float32)


def gradients(rank):
    return [integers(rank, shape).to(torch.get_default_device()) for shape in SHAPES]


def backward(forward, rank):
    """Three passes. Returns the last gradients, of DTensors this rank's part."""
    for _ in range(3):
        forward.zero_grad()
        forward(gradients(rank)).backward()
    return [getattr(p.grad, "_local_tensor", p.grad).clone() for p in forward.parameters()]


def with_front_end(rank, name, config):
    forward, comm = FRONT_ENDS[name].make(model(), config)
    found = backward(forward, rank)
    comm.load_state_dict(comm.state_dict(**({"consolidated": True} if name == "hook" else {})))
    str(comm), comm.stats().scalars()
    getattr(comm, "nonfinite_report", list)()  # a CommState has none
    end(comm)
    return found


def with_horovod(rank, name, config):
    hvd.init()
    trained = model()
    hvd.broadcast_parameters(trained.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), 0.1), trained.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        trained(gradients(rank)).backward()
        optimizer.step()
    found = [p.detach() for p in trained.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    own = gradients(rank)[1]
    sparse = torch.sparse_coo_tensor([[0, rank]], own[:2], (5,))
    found += [hvd.allreduce(own), hvd.allgather(own), hvd.broadcast(own, 0), hvd.alltoall(own)]
    found += [hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense()]
    assert hvd.broadcast_object([rank], 0) == [0] and hvd.allgather_object(rank) == [0, 1]
    hvd.barrier()
    hvd.shutdown()
    return found


def with_simulation(rank, name, config):
    return [simulate([gradients(other)[0].flatten() for other in range(2)], wire) for wire in ("int8", "int4")]


WAYS = {
    **{name: (with_front_end, name, front_end.config("int8")) for name, front_end in FRONT_ENDS.items()},
    "hook, feedback": (with_front_end, "hook", Config("int8", feedback=Feedback())),
    "hook, int4": (with_front_end, "hook", Config("int4")),
    "FSDP2, feedback": (with_front_end, "FSDP2, replicate", Config("int8", feedback=Feedback())),
    "Horovod": (with_horovod, "", None),
    "simulation": (with_simulation, "", None),
}


def with_default(rank, world_size, way, dtype):
    function, name, config = WAYS[way]
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            return function(rank, name, config)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("way", few(WAYS, "hook, int4", "DataParallel", "FSDP2, feedback"))
def test_the_default_dtype_changes_nothing_and_no_call_is_deprecated(ranks, way):
    expected = ranks.run(with_default, way, torch.float32, world_size=2)
    for dtype in (torch.float64, torch.bfloat16):
        for ours, theirs in zip(ranks.run(with_default, way, dtype, world_size=2), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


# --- accelerators ---------------------------------------------------------------------------------------------------


def on_device(rank, world_size, name, device):
    with torch.device(device):
        return [each.cpu() for each in with_front_end(rank, name, on_streams.CONFIGS[name])]


@pytest.mark.parametrize("name", on_streams.CONFIGS)
def test_an_accelerators_streams_give_the_cpus_bits(ranks_on_streams, ranks, name):
    """See tests/helpers/on_streams.py."""
    on_cpu = ranks.run(on_device, name, "cpu", world_size=2)
    for ours, theirs in zip(ranks_on_streams.run(on_device, name, on_streams.DEVICE), on_cpu, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


# --- inference mode -------------------------------------------------------------------------------------------------


def in_inference_mode(rank, world_size, consolidated):
    """State saved in inference mode, and loaded there and outside, beside that of a run without it."""
    found = []
    for mode in (False, True):
        forward, comm = FRONT_ENDS["FSDP2, replicate"].make(model(), Config("int4", feedback=Feedback()))
        backward(forward, rank)
        with torch.inference_mode(mode):
            state = comm.state_dict(**({"consolidated": True} if consolidated else {}))
            comm.load_state_dict(state)
        comm.load_state_dict(state)
        # A tensor that somebody else has made there.
        with torch.inference_mode(mode):
            state["residuals"] = {key: values.clone() for key, values in state["residuals"].items()}
        comm.load_state_dict(state)
        assert any(values.abs().max() > 0 for values in state["residuals"].values())
        found.append(backward(forward, rank))
        end(comm)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("consolidated", [False, True])
def test_fsdp2s_state_may_be_saved_and_loaded_in_inference_mode(ranks, consolidated):
    """That of other front ends: tests/session/test_nothing_is_lost.py."""
    ranks.run(in_inference_mode, consolidated, world_size=2)


# --- copies ---------------------------------------------------------------------------------------------------------


class Trainer:
    """Holds the handle, as trainers do. The module holds it, too."""

    def __init__(self, name, config):
        self.forward, self.comm = FRONT_ENDS[name].make(model(), config)
        self.forward.__dict__["comm"] = self.comm


def copies(rank, world_size, name, config):
    """What copies of a handle say, and gradients of the original afterwards."""
    trainer, said, means = Trainer(name, config), [], [mean_of_integers(world_size, shape) for shape in SHAPES]
    backward(trainer.forward, rank)
    for other in (copy.deepcopy(trainer), read(file_of(trainer))):
        assert other.comm is other.forward.__dict__["comm"] is not trainer.comm
        for handle in (other.comm, copy.deepcopy(other.comm), copy.copy(other.comm)):
            said += [refusal(getattr(handle, method)) for method in ("stats", "plan", "state_dict", "__enter__")]
            handle.detach()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own = backward(other.forward, rank)
        num_warnings = sum("copy of one with fusedcomm" in str(each.message) for each in caught)
        assert num_warnings == (name == "hook")  # the copy has DDP's own all-reduce, and may be attached
        assert all(map(torch.equal, own, means if name == "hook" else gradients(rank)))
        if name == "hook":
            with fusedcomm.attach(other.forward, "bf16", quiet=True) as comm:
                backward(other.forward, rank)
                assert comm.stats().steps == 3
    return said, backward(trainer.forward, rank)


@pytest.mark.parametrize(("name", "config"), [("hook", "bf16"), ("hook", "auto"), ("reducer", "bf16")])
def test_a_copied_handle_is_attached_to_nothing_and_says_so(ranks, name, config):
    means = [mean_of_integers(2, shape) for shape in SHAPES]
    for said, still in ranks.run(copies, name, config, world_size=2):
        assert all(text.startswith("RuntimeError: fusedcomm: this ") and " is a copy" in text for text in said), said
        assert all(map(torch.equal, still, means))
