"""Nothing is lost, whatever happens between backward passes: a handle is saved and made anew, on another number of
ranks, with other buckets or another wire, its group changes, parameters are frozen. Hypothesis draws what happens."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from checkpoints import file_of, read
from front_ends import adding_up
from models import Gradients, integers, normal, synchronized
from sampling import few, for_all_lists
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback, TwoLevels

NUM_EXAMPLES = few([3, 60], 3)


def detach(comm):
    """Of None, and of a CommState, which stays with its module, nothing."""
    if hasattr(comm, "detach"):
        comm.detach()


# ---- the bits of a run that nothing has interrupted


class Trained:
    """A model, its front end, and perhaps a ShardedOptimizer, or with FSDP2 an optimizer of its shards."""

    def __init__(self, front_end, config):
        # DistributedDataParallel cuts buckets anew after its first pass, which a resumed run has again.
        shapes = ((64, 96), (40, 50), (3, 1000)) if front_end in ("reducer", "DataParallel", "owners") else ((20011,),)
        self.model, self.weighted = Gradients(*shapes), config.weighted
        made_by = "reducer" if front_end == "owners" else front_end
        self.forward, self.comm = synchronized(made_by, self.model, config, bucket_mib=0.02)
        self.parts = [self.model, self.comm]
        if front_end == "owners":
            options = {"lr": 0.1, "update": "int8", "quiet": True}
            self.parts.append(fusedcomm.ShardedOptimizer(self.comm, torch.optim.SGD, **options))
        if front_end == "FSDP2":
            self.parts.append(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    @property
    def num_steps(self):
        state = self.comm.state_dict()
        return state["step"] if "step" in state else max(state["calls"].values())

    def backward(self, rank, number):
        if self.weighted:
            self.comm.weight = 1 + 2 * ((rank + number) % 2)
        loss = self.forward([normal(rank, 10 * number + i, p.shape) for i, p in enumerate(self.model.weights)])
        loss.backward()
        return loss.detach()

    def take_pass(self, rank, number, adds_up):
        """The loss, and what a step ends with: gradients, or an optimizer's parameters, with FSDP2 this rank's."""
        self.forward.zero_grad()
        if adds_up:
            with adding_up(self.forward, self.comm):
                self.backward(rank, number + 100)
        loss = self.backward(rank, number)
        for optimizer in self.parts[2:]:
            optimizer.step()
        ends = [p if self.parts[2:] else p.grad for p in self.model.weights]
        return [loss, *(getattr(each, "_local_tensor", each).detach().clone() for each in ends)]

    def load(self, file):
        for part, state in zip(self.parts, read(file), strict=True):
            part.load_state_dict(state)

    def save(self):
        return file_of([part.state_dict() for part in self.parts])


def beside_an_interrupted_run(rank, world_size, front_end, config, actions):
    """The numbers of passes after which an interrupted run has other bits than one without interruptions."""
    seen = {False: [], True: []}
    for is_interrupted in (False, True):
        run, number = Trained(front_end, config), 0
        run.take_pass(rank, number, False)
        for action in actions:
            if action in ("pass", "two passes"):
                number += 1
                seen[is_interrupted].append(run.take_pass(rank, number, action == "two passes"))
                assert run.num_steps == number + 1
            elif is_interrupted and action == "in inference mode":  # as in a trainer's evaluation
                with torch.inference_mode():
                    state = run.comm.state_dict()
                    assert not any(values.is_inference() for values in state["residuals"].values())
                    state["residuals"] = {name: values.clone() for name, values in state["residuals"].items()}
                    run.comm.load_state_dict(state)
            elif is_interrupted:
                file = run.save()
                if action == "make anew":
                    detach(run.comm)
                    run = Trained(front_end, config)
                else:  # what happens in between is forgotten
                    run.take_pass(rank, 50, False)
                run.load(file)
        detach(run.comm)
    pairs = zip(seen[False], seen[True], strict=True)
    return [number for number, pair in enumerate(pairs) if not all(map(torch.equal, *pair))]


CODES = {"1d": "int4"}


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize(
    ("front_end", "config"),
    [
        ("hook", Config("int4", wires=CODES, feedback=Feedback())),
        ("CommState", Config("int4", wires=CODES, feedback=Feedback())),
        ("reducer", Config("int8", feedback=Feedback())),
        ("DataParallel", Config("int8", feedback=Feedback(), weighted="sum")),
        ("owners", Config("int8")),
        pytest.param("FSDP2", Config("int8", params="int8", wires=CODES), marks=pytest.mark.check),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupted_run_has_the_bits_of_one_that_went_on(ranks, front_end, config, num_examples):
    def law(actions):
        actions = [*actions, "pass"]
        assert ranks.run(beside_an_interrupted_run, front_end, config, actions, world_size=2) == [[]] * 2

    for_all_lists(["pass", "two passes", "make anew", "load again", "in inference mode"], num_examples, law)


# ---- what was not delivered is in the residuals

SHAPES = ((64, 33), (128,), (40, 50), (3, 1000), (7,), (0, 5))
SMALL, LARGE = 0.012, 1.0
"""MiB of a bucket."""


class Ledger:
    """A front end of the first 4 or 2 of 4 ranks, and the means that it still owes. After each pass its means plus the
    mean residual are the mean gradients plus what was owed."""

    def __init__(self, front_end, config):
        self.front_end, self.config, self.number, self.frozen, self.wrong = front_end, config, 0, False, []
        self.groups = {4: dist.group.WORLD, 2: dist.new_group([0, 1])}
        self.owed = [torch.zeros(shape, dtype=torch.float64).flatten() for shape in SHAPES]
        self.names = [f"weights.{i}" for i in range(len(SHAPES))]
        self.make(SMALL, 4)
        self.take_pass()

    def make(self, bucket_mib, size):
        self.size, self.comm = size, None
        if dist.get_rank() >= size:
            return
        self.model, group = Gradients(*SHAPES), self.groups[size]
        self.model.weights[0].requires_grad_(not self.frozen)
        if self.front_end == "CommState without names":
            self.names = []
            self.forward = DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=bucket_mib)
            self.comm = fusedcomm.CommState(self.config, process_group=group)
            self.forward.register_comm_hook(self.comm, fusedcomm.comm_hook)
        else:
            self.forward, self.comm = synchronized(self.front_end, self.model, self.config, bucket_mib, group=group)

    def mean(self, tensors):
        """Of float64 copies over the ranks that take part."""
        tensors = [each.double().flatten() for each in tensors]
        for each in tensors:
            dist.all_reduce(each, group=self.groups[self.size])
        return [each / self.size for each in tensors]

    def residuals(self):
        """The mean residual of each parameter; zeros where its bucket is summed exactly."""
        own = self.comm.state_dict()["residuals"]
        return self.mean(
            [own.get(name, torch.zeros_like(zeros)) for name, zeros in zip(self.names, self.owed, strict=True)]
        )

    def backward(self):
        """Returns this rank's gradients, which it has in no more bits than the exact wires leave room for."""
        self.number += 1
        seed = 10 * (4 * self.number + dist.get_rank())
        gradients = [integers(seed + i, shape) + integers(seed - i, shape) / 512 for i, shape in enumerate(SHAPES)]
        self.forward(gradients).backward()
        return [each.flatten() * p.requires_grad for each, p in zip(gradients, self.model.weights, strict=True)]

    def step(self, adds_up=False):
        """Returns this rank's gradients, and the means."""
        self.forward.zero_grad()
        before = [torch.zeros(())] * len(SHAPES)
        if adds_up:
            with adding_up(self.forward, self.comm):
                before = self.backward()
        given = [a + b for a, b in zip(before, self.backward(), strict=True)]
        got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.model.weights]
        return given, [each.double().flatten() for each in got]

    def take_pass(self, adds_up=False, num_joined=0):
        if self.comm is None:
            return
        if num_joined:  # a rank that has finished takes part with zeros, and sends its residuals
            with Join([self.forward]):
                steps = [self.step() for _ in range(num_joined)]
        else:
            steps = [self.step(adds_up)]
        given, got = ([sum(each) for each in zip(*of, strict=True)] for of in zip(*steps, strict=True))
        expected = [a + b for a, b in zip(self.mean(given), self.owed, strict=True)]
        if not self.names:
            self.find_names(got, expected)
        self.owed = self.residuals()
        # bf16 and fp16 leave out what fp32 has exactly, and here no sum has more bits.
        tolerance = 0.0 if self.config.wire in ("bf16", "fp16") else 1e-4
        sees_all = num_joined != 1
        for name, mean, owed, total in zip(self.names, got, self.owed, expected, strict=True):
            if sees_all and not torch.allclose(mean + owed, total, rtol=0, atol=tolerance):
                self.wrong.append(f"{name}, pass {self.number}")
        if not any(owed.any() for owed in self.owed):
            self.wrong.append(f"nothing was left out, pass {self.number}")

    def find_names(self, got, expected):
        """Where a hook does not know the parameters' names, each name is found by its residual."""
        own = self.comm.state_dict()["residuals"]
        of_names = dict(zip(sorted(own), self.mean([own[name] for name in sorted(own)]), strict=True))
        for mean, total in zip(got, expected, strict=True):
            alike = {name: values for name, values in of_names.items() if len(values) == len(mean)}
            self.names += [name for name, values in alike.items() if torch.equal(mean + values, total)][:1] or ["exact"]

    # What may happen before a pass.

    def go_on(self): ...

    def autocast(self): ...

    def reload(self, bucket_mib, size, consolidated):
        shared, file = [self.owed, b""], b""
        if self.comm is not None:
            with torch.inference_mode(self.number % 2 == 0):
                file = shared[1] = file_of(self.comm.state_dict(consolidated))
            detach(self.comm)
        dist.broadcast_object_list(shared, src=0)
        self.owed = shared[0]
        self.make(bucket_mib, size)
        if self.comm is not None:
            self.comm.load_state_dict(read(shared[1] if consolidated else file, weights_only=True))

    def make_anew(self, bucket_mib):
        self.reload(bucket_mib, self.size, consolidated=False)

    def change_wire(self):
        other = {"bf16": "fp16", "fp16": "bf16"}.get(self.config.wire, "int8")
        self.config = dataclasses.replace(self.config, wire=other)
        self.make_anew(SMALL)

    def freeze(self):
        """Or thaw."""
        self.frozen = not self.frozen
        if self.comm is not None:
            self.model.weights[0].requires_grad_(not self.frozen)


def kept(rank, world_size, front_end, config, actions):
    ledger = Ledger(front_end, config)
    for name, *arguments in actions:
        if name in ("add_up", "join"):
            num_joined = 0 if name == "add_up" else 2 - min(rank, 1)
            ledger.take_pass(name == "add_up", num_joined)
        else:
            getattr(ledger, name)(*arguments)
            with torch.autocast("cpu", torch.float16, enabled=name == "autocast"):
                ledger.take_pass()
    detach(ledger.comm)
    return ledger.wrong


PASSES = [("go_on",), ("add_up",), ("autocast",)]
RELOADS = [("reload", mib, size, True) for mib in (SMALL, LARGE) for size in (2, 4)]
RELOADS += [("make_anew", SMALL), ("make_anew", LARGE), ("change_wire",)]
ACTIONS = {
    "hook": [*PASSES, *RELOADS, ("join",)],
    "CommState": [*PASSES, *RELOADS],
    "CommState without names": PASSES,
    "reducer": [*PASSES, *RELOADS, ("freeze",)],
}
EXACT = Config("bf16", "two-shot", feedback=Feedback())
CODED = Config("int4", "two-shot", wires={"1d": "int4"}, feedback=Feedback())
SEVERAL = Config("int4", "two-shot", wires={"weights.2": "int8", "weights.3": "bf16"}, feedback=Feedback())
BY_HOST = dataclasses.replace(CODED, hosts=TwoLevels([[0, 1], [2, 3]], "fp32"))


def short(value: object) -> str:
    """In a test's id: a configuration's wire, and the number of actions."""
    return f"{len(value)} actions" if isinstance(value, list) else getattr(value, "wire", value)


CASES = [(front_end, EXACT, actions) for front_end, actions in ACTIONS.items()]
CASES += [("hook", CODED, ACTIONS["hook"]), ("reducer", SEVERAL, ACTIONS["reducer"])]
# Twice as many messages, and as many seconds.
by_host = ("hook", BY_HOST, [*PASSES, *(reload for reload in RELOADS if 2 not in reload)])
CASES.append(pytest.param(*by_host, marks=pytest.mark.check))


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize(("front_end", "config", "actions"), CASES, ids=short)
def test_what_was_not_delivered_is_in_the_residuals(ranks, front_end, config, actions, num_examples):
    def law(drawn):
        assert ranks.run(kept, front_end, config, drawn, world_size=4) == [[]] * 4

    for_all_lists(actions, num_examples, law)
