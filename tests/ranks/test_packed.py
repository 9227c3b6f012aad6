"""What a rank's state is sent as: everything that people keep there comes back as it was, and nothing runs code."""

import collections
import enum
import math
import random
import types

import numpy
import pytest
import torch

from fusedcomm.ranks.objects import fill, pack, ranges, unpack

Position = collections.namedtuple("Position", ["epoch", "index"])


class Phase(enum.IntEnum):
    WARM = 1


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def warm_up() -> dict:
    made = optimizer()
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(made, 0.1, total_iters=4), schedulers.MultiStepLR(made, [3, 6, 6])]
    return schedulers.SequentialLR(made, parts, milestones=[4]).state_dict()


def plateau() -> dict:
    made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer(), patience=1)
    made.step(numpy.mean([1.0, 2.0]))
    return made.state_dict()


VALUES = {
    "numbers": (None, True, 1 << 200, -0.0, math.inf, 1e-300, 1 + 2j, "é\ud800", b"\x00\xff", bytearray(b"a")),
    "python's random state": random.Random(7).getstate(),
    "numpy's random states": (numpy.random.RandomState(7).get_state(), numpy.random.PCG64(7).state),
    "numpy's numbers": (numpy.float64(1.5), numpy.float32(2), numpy.int8(-1), numpy.bool_(True), numpy.str_("ab")),
    "numpy's arrays": [numpy.arange(6.0).reshape(2, 3).T, numpy.array(3), numpy.zeros((0, 2)), numpy.array(["a", "b"])],
    "tensors": [torch.arange(6).view(2, 3).t(), torch.tensor(1.5), torch.tensor([True]), torch.zeros(0)],
    "odd tensors": [torch.full((2,), 1 + 2j).conj(), torch.ones(3, dtype=torch.bfloat16)],
    "parameters": [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1), requires_grad=False)],
    "torch's": (torch.float32, torch.device("cpu"), torch.Size([2, 3])),
    "sets": ({1, "a"}, frozenset({(1, 2)}), collections.deque([1, 2], maxlen=3)),
    "dicts": {1: "a", (2, "b"): [()], "c": collections.Counter("aab"), None: collections.defaultdict(list, {1: [2]})},
    "classes": [Position(1, Position(2, 3)), Phase.WARM],
    "a warm-up, then steps": warm_up(),
    "ReduceLROnPlateau": plateau(),
    "GradScaler": torch.amp.GradScaler("cpu").state_dict(),
    "a model": torch.nn.BatchNorm1d(2).state_dict(),
}  # fmt: skip


def received(value):
    packed, tensors = pack(value, "it")
    made, into = unpack(packed)
    content = b"".join(ranges(tensors, 0, 1 << 60)) + b" "
    fill(into, torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return made


def alike(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        kept = alike(getattr(one, "__dict__", None), getattr(other, "__dict__", None))
        return factories and kept and alike(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other and repr(one) == repr(other)


@pytest.mark.parametrize("name", VALUES)
def test_what_people_keep_comes_back_as_it_was(name):
    assert alike(received(VALUES[name]), VALUES[name])


class Opaque:
    pass


def itself() -> list:
    made: list = []
    made.append(made)
    return made


REFUSED = {
    "an object": (lambda: {"a": [Opaque()]}, r"it\['a'\]\[0\] is a test_packed.Opaque"),
    "a function": (lambda: {"fn": itself}, r"it\['fn'\] is a builtins.function"),
    "objects of numpy": (lambda: (numpy.array([None]),), r"it\[0\] is a numpy.ndarray of object"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "it is a tensor of torch.sparse_coo"),
    "a tensor without memory": (lambda: torch.ones(2, device="meta"), "it is a torch.Tensor on meta"),
    "a local class": (lambda: collections.namedtuple("Local", ["x"])(1), "Local"),
    "a defaultdict of a function": (lambda: collections.defaultdict(itself), "a defaultdict of <function itself"),
    "a dict of another kind": (lambda: [types.MappingProxyType({})], r"it\[0\] is a builtins.mappingproxy"),
    "itself": (itself, "it contains itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_named_where_it_is(name):
    make, text = REFUSED[name]
    with pytest.raises(TypeError, match=f"^fusedcomm: .*{text}.*, and another rank cannot be given that, but tensors"):
        pack(make(), "it")


@pytest.mark.parametrize("name", ["system", "path"])
@pytest.mark.parametrize("kind", ["namedtuple", "enum"])
def test_a_class_that_is_none_of_these_kinds_is_not_made(kind, name):
    content = "[1]" if kind == "namedtuple" else '"x"'
    with pytest.raises(TypeError, match=f"has a os.{name}: import that {kind}"):
        unpack(f'["{kind}", "os", "{name}", {content}]'.encode())
