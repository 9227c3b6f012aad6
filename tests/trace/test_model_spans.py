"""The model in a trace: its forward and backward passes, the wait for buckets, and the optimizer's steps."""

import contextlib
import itertools

import pytest
import torch
from models import Branches, Mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint
from traces import read, read_model

import fusedcomm

X = torch.ones(4, 10)
PASS = ["forward", "backward", "wait"]
STEP = [*PASS, "optimizer"]
SMALL_BUCKETS = {"bucket_cap_mb": 0.01}


class Checkpointed(Mlp):
    """A model that computes its activations again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers[1:], self.layers[0](x), use_reentrant=self.use_reentrant)


class TwoOutputs(Mlp):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers[:3](x)
        return {"logits": self.layers[3:](hidden), "hidden": hidden, "input": x}


def one_step(ddp, optimizer):
    optimizer.zero_grad()
    ddp(X).sum().backward()
    optimizer.step()


def accumulating(ddp, optimizer):
    for index in range(3):
        with ddp.no_sync() if index < 2 else contextlib.nullcontext():
            ddp(X).sum().backward()
    optimizer.step()


def two_forwards(ddp, optimizer):
    (ddp(X).sum() + ddp(2 * X).sum()).backward()
    optimizer.step()


def without_optimizer(ddp, optimizer):
    ddp(X).sum().backward()


def two_outputs(ddp, optimizer):
    outputs = ddp(X)
    (outputs["logits"].sum() + outputs["hidden"].sum()).backward()
    optimizer.step()


def evaluating(ddp, optimizer):
    one_step(ddp, optimizer)
    with torch.no_grad():
        ddp(X)


def with_a_closure(ddp, optimizer):
    def closure():
        loss = ddp(X).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def with_others_optimizer(ddp, optimizer):
    other = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    ddp(X).sum().backward()
    other.step()
    optimizer.step()


def failing_forward(ddp, optimizer):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ddp(torch.ones(4, 11))
    one_step(ddp, optimizer)


def traced(path, make, ddp_kwargs, step, num_steps):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(make(), **ddp_kwargs)
    comm = fusedcomm.attach(ddp, "bf16", quiet=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(2):
        step(ddp, optimizer)
    with comm.trace(path):
        for _ in range(num_steps):
            step(ddp, optimizer)
    comm.detach()


CASES = {
    "plain": (Mlp, {}, one_step, STEP),
    "static_graph": (Mlp, {"static_graph": True, **SMALL_BUCKETS}, one_step, STEP),
    "find_unused": (Branches, {"find_unused_parameters": True, **SMALL_BUCKETS}, one_step, STEP),
    "no_sync": (Mlp, {}, accumulating, [*2 * ["forward", "backward"], *STEP]),
    "two_forwards": (Mlp, {}, two_forwards, ["forward", *STEP]),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), {}, one_step, STEP),
    "checkpoint_reentrant": (lambda: Checkpointed(use_reentrant=True), {"static_graph": True}, one_step, STEP),
    "without_optimizer": (Mlp, {}, without_optimizer, PASS),
    "two_outputs": (TwoOutputs, {}, two_outputs, STEP),
    "evaluating": (Mlp, {}, evaluating, [*STEP, "forward"]),
    "closure": (Mlp, {}, with_a_closure, ["optimizer", *PASS]),
    "others_optimizer": (Mlp, {}, with_others_optimizer, STEP),
    "failing_forward": (Mlp, {}, failing_forward, ["forward", *STEP]),
}


def trace_all(rank, world_size, cases, folder):
    for case in cases:
        make, ddp_kwargs, step, _ = CASES[case]
        traced(folder / f"{case}-{{rank}}.json", make, ddp_kwargs, step, num_steps=2)


def end(event):
    return round(event["ts"] + event["dur"], 3)  # whole nanoseconds


def check_shown(model: list[dict], case: str) -> None:
    """Checks the events of two steps."""
    shown = CASES[case][3]
    assert [event["name"] for event in model] == 2 * shown
    assert {event["track"] for event in model} == {"model"}
    first = model[0]["args"]["step"]
    expected = [first] * len(shown) + [first + 1] * len(shown)
    if case == "evaluating":  # an evaluation belongs to the step that would come next
        expected[len(shown) - 1], expected[-1] = first + 1, first + 2
    assert [event["args"]["step"] for event in model] == expected
    if case != "closure":
        assert {event["lane"] for event in model} == {"model"}
        assert all(end(before) <= after["ts"] for before, after in itertools.pairwise(model))


@pytest.mark.parametrize("third", range(3))
def test_a_step_of_the_model_is_shown_as_it_ran(ranks, subtests, tmp_path, third):
    cases = list(CASES)[third::3]
    ranks.run(trace_all, cases, tmp_path, world_size=2)
    for case in cases:
        for rank in range(2):
            with subtests.test(case=case, rank=rank):
                check_shown(read_model(tmp_path / f"{case}-{rank}.json"), case)


def trace_small_buckets(rank, world_size, folder):
    traced(folder / "{rank}.json", Mlp, SMALL_BUCKETS, one_step, num_steps=3)


def of_step(events, stage, step):
    return [event for event in events if event["args"]["stage"] == stage and event["args"]["step"] == step]


def test_buckets_are_handed_over_in_the_backward_pass_and_arrive_before_the_wait_ends(ranks, tmp_path):
    ranks.run(trace_small_buckets, tmp_path, world_size=2)
    for rank in range(2):
        model, buckets = read_model(tmp_path / f"{rank}.json"), read(tmp_path / f"{rank}.json")
        for step in (2, 3, 4):
            (backward,), (wait,) = of_step(model, "backward", step), of_step(model, "wait", step)
            (exposed,) = of_step(buckets, "exposed", step)
            of_this = of_step(buckets, "bucket", step)
            assert len(of_this) > 1
            assert end(backward) < wait["ts"]
            assert all(backward["ts"] <= bucket["ts"] <= end(backward) for bucket in of_this)
            assert all(end(bucket) <= end(wait) for bucket in of_this)
            assert backward["ts"] <= exposed["ts"] <= end(backward) and end(exposed) <= end(wait)


def hooks_of(ddp):
    tables = (
        ddp._forward_pre_hooks,
        ddp._forward_hooks,
        ddp._forward_hooks_always_called,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return [list(table) for table in tables]


def hooks_around(rank, world_size, path):
    """The hooks before, in and after a trace that ends with an error, and those of an output afterwards."""
    ddp = DistributedDataParallel(Mlp())
    comm = fusedcomm.attach(ddp, "bf16", quiet=True)
    ddp(X).sum().backward()
    before = hooks_of(ddp)
    with contextlib.suppress(KeyError), comm.trace(path):
        within = hooks_of(ddp)
        output = ddp(X)
        within_output = len(output._backward_hooks)
        raise KeyError
    after = hooks_of(ddp)
    output.sum().backward()
    return before, within, after, within_output, len(output._backward_hooks)


def test_hooks_are_there_only_while_a_trace_is_taken(ranks, tmp_path):
    for before, within, after, of_output, of_output_after in ranks.run(
        hooks_around, str(tmp_path / "{rank}.json"), world_size=2
    ):
        assert before == after
        assert [len(now) - len(then) for now, then in zip(within, before, strict=True)] == [1, 1, 1, 1, 1]
        assert (of_output, of_output_after) == (1, 0)
