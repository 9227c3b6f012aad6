"""What holds for every front end: which passes it synchronizes, and what parameters get that some ranks do not use. It
heeds neither torch's default dtype nor inference mode, and calls nothing of torch by a deprecated name."""

import ast
import re
import warnings

import on_streams
import pytest
import torch
import torch.distributed as dist
from models import (
    Branches,
    Gradients,
    by_kind,
    constant,
    integers,
    no_sync_of,
    synchronize,
    synchronized,
)
from sampling import few
from scripts import ROOT
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Chunks, Config, Feedback
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


def backward(forward, rank, trained):
    """Three passes. Returns the last gradients, of DTensors this rank's part."""
    for _ in range(3):
        trained.zero_grad()
        forward(gradients(rank)).backward()
    return [getattr(p.grad, "_local_tensor", p.grad).clone() for p in trained.parameters()]


def with_ddp(rank, config):
    ddp = DistributedDataParallel(model())
    comm = fusedcomm.attach(ddp, config, quiet=True)
    found = backward(ddp, rank, ddp)
    comm.load_state_dict(comm.state_dict(consolidated=True))
    str(comm), comm.stats().scalars(), comm.nonfinite_report()
    comm.detach()
    return found


def with_data_parallel(rank, config):
    wrapped = fusedcomm.DataParallel(model(), config=config, quiet=True)
    found = backward(wrapped, rank, wrapped)
    wrapped.comm.detach()
    return found


def with_fsdp(rank, config):
    sharded = model()
    fully_shard(sharded)
    comm = fusedcomm.attach(sharded, config, quiet=True)
    found = backward(sharded, rank, sharded)
    comm.load_state_dict(comm.state_dict())
    comm.detach()
    return found


def with_horovod(rank, config):
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


def with_simulation(rank, config):
    return [simulate([gradients(other)[0].flatten() for other in range(2)], wire) for wire in ("int8", "int4")]


WAYS = {
    "DDP": (with_ddp, Config("int8", feedback=Feedback())),
    "DDP, int4": (with_ddp, Config("int4")),
    "DataParallel": (with_data_parallel, Config("int8", measure_every=1)),
    "FSDP2": (with_fsdp, Config("int8")),
    "FSDP2, feedback": (with_fsdp, Config("int8", feedback=Feedback(unsharded=True))),
    "Horovod": (with_horovod, None),
    "simulation": (with_simulation, None),
}


def with_default(rank, world_size, way, dtype):
    function, config = WAYS[way]
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            return function(rank, config)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("way", few(WAYS, "DDP, int4", "DataParallel", "FSDP2, feedback"))
def test_the_default_dtype_changes_nothing_and_no_call_is_deprecated(ranks, way):
    expected = ranks.run(with_default, way, torch.float32, world_size=2)
    for dtype in (torch.float64, torch.bfloat16):
        for ours, theirs in zip(ranks.run(with_default, way, dtype, world_size=2), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


# --- accelerators ---------------------------------------------------------------------------------------------------

CHUNKS = Chunks(nbytes=4096, in_flight=2)
"""Several, so that packing, the wire and unpacking are on streams of their own."""
ON_STREAMS = {
    "DDP": (with_ddp, Config("bf16", sum="two-shot", feedback=Feedback("fp32"), chunks=CHUNKS)),
    "DataParallel": (with_data_parallel, Config("bf16")),
    "FSDP2": (with_fsdp, Config("bf16", feedback=Feedback("fp32", unsharded=True), chunks=CHUNKS)),
}


def on_device(rank, world_size, way, device):
    function, config = ON_STREAMS[way]
    with torch.device(device):
        return [each.cpu() for each in function(rank, config)]


@pytest.mark.parametrize("way", ON_STREAMS)
def test_an_accelerators_streams_give_the_cpus_bits(ranks_on_streams, ranks, way):
    """See tests/helpers/on_streams.py."""
    on_cpu = ranks.run(on_device, way, "cpu", world_size=2)
    for ours, theirs in zip(ranks_on_streams.run(on_device, way, on_streams.DEVICE), on_cpu, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


# --- inference mode -------------------------------------------------------------------------------------------------


def in_inference_mode(rank, world_size, kind, consolidated):
    """State saved in inference mode, and loaded there and outside, beside that of a run without it."""
    found = []
    for mode in (False, True):
        forward, comm = synchronized(kind, model(), Config("int4", feedback=Feedback(unsharded=kind == "FSDP2")))
        backward(forward, rank, forward)
        with torch.inference_mode(mode):
            state = comm.state_dict(**({"consolidated": True} if consolidated else {}))
            comm.load_state_dict(state)
        comm.load_state_dict(state)
        # A tensor that somebody else has made there.
        with torch.inference_mode(mode):
            state["residuals"] = {name: values.clone() for name, values in state["residuals"].items()}
        comm.load_state_dict(state)
        assert any(values.abs().max() > 0 for values in state["residuals"].values())
        found.append(backward(forward, rank, forward))
        if kind != "CommState":
            comm.detach()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "consolidated"),
    [
        ("hook", False),
        ("hook", True),
        ("reducer", False),
        ("DataParallel", True),
        ("CommState", False),
        ("FSDP2", False),
    ],
)
def test_state_may_be_saved_and_loaded_in_inference_mode(ranks, kind, consolidated):
    ranks.run(in_inference_mode, kind, consolidated, world_size=2)


# --- passes, groups, unused parameters ------------------------------------------------------------------------------


def accumulated(rank, world_size, wire, front_end):
    model = Gradients((5000,))
    config = Config(wire, wires={"1d": wire})
    forward, comm = synchronized(front_end, model, config)
    no_sync, gradient = no_sync_of(forward, comm), [torch.full((5000,), float(rank + 1))]
    synchronize(forward, gradient, steps=2)
    forward.zero_grad(set_to_none="views" not in front_end)
    before = comm.stats().buckets
    with no_sync():
        forward(gradient).backward()
        with no_sync():
            forward(gradient).backward()
        forward(gradient).backward()
    during = comm.stats().buckets - before
    local = model.weights[0].grad.unique().tolist()
    forward(gradient).backward()
    return during, local, model.weights[0].grad.unique().tolist(), comm.stats().steps


@pytest.mark.sampled(by=by_kind)
@pytest.mark.parametrize("front_end", ["hook", "hook with views", "reducer", "DataParallel"])
@pytest.mark.parametrize("wire", fusedcomm.WIRES)
def test_no_sync_adds_up_and_the_next_pass_sends_the_sum(ranks, wire, front_end):
    for rank, (during, local, seen, steps) in enumerate(ranks.run(accumulated, wire, front_end, world_size=2)):
        assert during == 0 and local == [3.0 * (rank + 1)] and seen == [constant(6.0, wire)] and steps == 3


def on_a_subgroup(rank, world_size, front_end):
    subgroups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    config = Config("int8", wires={"1d": "int8"})
    forward, _ = synchronized(front_end, Gradients((6000,)), config, group=subgroups[rank // 2])
    return synchronize(forward, [torch.full((6000,), float(rank))])[0].unique().tolist()


@pytest.mark.parametrize("front_end", ["hook", "reducer"])
def test_a_group_of_some_of_the_ranks(ranks, front_end):
    assert ranks.run(on_a_subgroup, front_end) == [[0.5], [0.5], [2.5], [2.5]]


def unused(rank, world_size, front_end, wire, stale):
    model = Branches()
    config = Config(wire, wires={"1d": wire})
    forward, _ = synchronized(front_end, model, config, bucket_mib=0.0005, find_unused=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    marker = torch.full((16, 16), 7.1) if stale else None
    model.never.weight.grad = marker
    seen = []
    for _ in range(2):
        forward.zero_grad(set_to_none=not stale)
        if stale:
            marker.fill_(7.1)
        forward(torch.ones(1, 10)).sum().backward()
        seen.append((model.even.weight.grad.clone(), model.odd.weight.grad.clone()))
    never = model.never.weight.grad
    return never is marker, None if never is None else never.unique().tolist(), seen, model.never.bias.grad


@pytest.mark.sampled
@pytest.mark.parametrize("front_end", ["hook", "reducer", "DataParallel"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("stale", [False, True])
def test_unused_parameters_count_as_zeros_or_keep_their_gradient(ranks, front_end, wire, stale):
    outcome = ranks.run(unused, front_end, wire, stale, world_size=2)
    used_by_both = 5 * 0.125 * (10 * 0.125 + 0.125)
    for is_marker, never, seen, bias in outcome:
        assert is_marker and bias is None and never == (pytest.approx([7.1]) if stale else None)
        for even, odd in seen:
            assert even.unique().tolist() == odd.unique().tolist() == pytest.approx([used_by_both / 2], rel=2.0**-7)
    for (a, b), (c, d) in zip(outcome[0][2], outcome[1][2], strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
