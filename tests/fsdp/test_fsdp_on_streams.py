"""FSDP2's reduce-scatters, all-reduces and all-gathers on the engine's CUDA path: as work of simulated streams
(tests/helpers/on_streams.py), and on interpreted kernels. All results are those of the CPU path, bit for bit."""

import dataclasses

import fake_cuda
import on_streams
import pytest
import torch
from models import KINDS, whole
from test_fsdp_feedback import gradients_of, made

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback

LOSSY_1D = {"1d": "int8"}
CONFIGS = {
    "fp32": Config("fp32"),
    "bf16": Config("bf16"),
    "fp16 chunked": Config("fp16", chunks=Chunks(4096)),
    "int8": Config("int8"),
    "int8 all": Config("int8", wires=LOSSY_1D, chunks=Chunks(4096)),
    "fp8": Config("fp8"),
    "int4": Config("int4", chunks=Chunks(4096)),
    "several wires": Config("int8", wires={"second.*": "int4", **LOSSY_1D}),
    "exempt": Config("bf16", wires={"first.*": "fp32"}),
    "parameters in int4": Config("int8", params="int4"),
    "parameters exempt": Config("int8", params="bf16", wires={"*": "fp32"}, chunks=Chunks(4096)),
}

FED_BACK = {"int4 fed back": Config("int4", feedback=Feedback(), chunks=Chunks(4096))}
"""Of all-reduces: reduce-scatters have no error feedback."""
KEPT = {"parameters kept": Config("int8", params="int8", params_kept=True, hosts=2)}
ALL = {**CONFIGS, **FED_BACK, **KEPT}


def by_what_config_has(name: str, **others: object) -> dict:
    """For `pytest.mark.sampled`."""
    config = ALL[name]
    has = {"feedback": config.feedback is not None, "params": config.params}
    return {"wire": KINDS.get(config.wire, "codes"), **has, **others}


def three_steps(model, rank, device):
    """The bits of this rank's gradients in three steps, and of the parameters that forward and backward passes have. In
    the second step two gradients are not finite."""
    seen = []
    model.register_forward_hook(
        lambda of, *_: seen.extend(
            getattr(p, "_local_tensor", p).detach().clone().flatten().float().cpu() for p in of.parameters()
        )
    )
    for step in range(3):
        gradients = gradients_of(model, rank, step)
        if step == 1:
            gradients[0].view(-1)[5 + rank] = torch.inf
            gradients[-1].view(-1)[-1 - rank] = torch.nan
        model.zero_grad()
        given = [gradient.to(device).requires_grad_() for gradient in gradients]
        model(given).backward()
        seen += [each.grad.flatten().cpu() for each in given]
        for parameter in model.parameters():
            local = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
            seen.append(local.flatten().float().cpu().clone())
    values = torch.cat(seen)
    # Which NaN a sum gives depends on the device.
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def steps_on(rank, world_size, kind, config, device):
    """This rank's gradients of three steps, the non-finite counts and the residuals."""
    model = made(kind, world_size, device)
    comm = fusedcomm.attach(model, config, quiet=True)
    values = three_steps(model, rank, device)
    residuals = {name: whole(each).cpu() for name, each in comm.state_dict()["residuals"].items()}
    counts = comm.stats().nonfinite_by_parameter
    comm.detach()
    return values, counts, residuals


CASES = [("sharded", name, world_size) for name in CONFIGS for world_size in (2, 3)]
CASES += [(f"gradients in {d}", name, 2) for d in ("bfloat16", "float16 +") for name in ("fp32", "bf16", "int8 all")]
CASES += [(f"gradients in {d}", "parameters in int4", 2) for d in ("bfloat16", "float16 +")]
CASES += [("gathered twice", "parameters kept", 4)]
CASES += [
    (kind, name, 4 if kind == "hsdp" else 2)
    for kind in ("hsdp", "replicate")
    for name in ("fp32", "bf16", "int8", "int4", *FED_BACK)
]


@pytest.mark.sampled(by=by_what_config_has)
@pytest.mark.parametrize(("kind", "name", "world_size"), CASES)
def test_sums_have_the_cpus_bits(ranks_on_streams, ranks, kind, name, world_size):
    config = dataclasses.replace(ALL[name], chunks=Chunks(ALL[name].chunks.nbytes or 1 << 20))
    cpu = ranks.run(steps_on, kind, config, "cpu", world_size=world_size)
    cuda = ranks_on_streams.run(steps_on, kind, config, on_streams.DEVICE, world_size=world_size)
    for own, other in zip(cpu, cuda, strict=True):
        assert torch.equal(own[0], other[0])
        assert own[1] == other[1] and sum(own[1].values()) == 2
        assert own[2].keys() == other[2].keys()
        assert all(torch.equal(own[2][name].nan_to_num(), other[2][name].nan_to_num()) for name in own[2])
        assert any(each.any() for each in own[2].values()) == (config.feedback is not None)


def on_the_kernels(rank, world_size, library, config):
    """steps_on() the CPU path, or with a `library` on the CUDA path, in one chunk."""
    with fake_cuda.path(library, config) as driver:
        found = steps_on(rank, world_size, "sharded", config, "cpu")
        assert driver is None or {kernel for kernel, _ in driver.launches} >= {"pack", "unpack"}
        return found


@pytest.mark.parametrize("name", ["bf16", "int8", "parameters in int4"])
def test_the_gpus_kernels_give_rows_the_cpus_bits(ranks, kernels_library, name):
    config = dataclasses.replace(ALL[name], chunks=Chunks(1 << 20))
    cpu, cuda = (ranks.run(on_the_kernels, driver, config, world_size=2) for driver in (None, kernels_library))
    for own, other in zip(cpu, cuda, strict=True):
        assert torch.equal(own[0], other[0]) and own[1:] == other[1:]
