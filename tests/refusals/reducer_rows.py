"""What GradReducer refuses."""

import functools

import torch
from models import Branches, Gradients, Mlp, reducer_of
from refusals import differ, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm


def ddp_over_reduced(_):
    reducer_of(model := Mlp()).detach()
    reducer = reducer_of(model)  # keeps the parameters; they can be taken again after detach()
    assert reducer.is_attached
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(2, 10)).sum().backward()


def of_ddps_module(rank):
    ddp = DistributedDataParallel(Mlp())
    reducer_of(ddp.module)


def ddps_on_rank_1(rank):
    """Rank 1's parameters are taken; the others would wait for it."""
    model, ddp = Mlp(), DistributedDataParallel(Mlp())
    reducer_of(ddp.module if rank == 1 else model)


def strides(rank):
    model = Gradients((50, 2), (3,))
    if rank == 1:
        model.weights[0] = nn.Parameter(torch.zeros(2, 50).t())
    reducer_of(model)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return self.embedding(x).sum()


def sparse_without_module(_):
    reducer = reducer_of((model := Embedded()).named_parameters())
    try:
        model(torch.ones(2, dtype=torch.int64)).backward()
    finally:
        reducer.detach()


def other_dtype(_):
    weight = (model := Gradients((40,), dtype=torch.bfloat16)).weights[0]
    weight.grad_dtype = torch.float32
    reducer_of(model)
    (weight.float() * torch.ones(40)).sum().backward()


def unused(_):
    reducer_of(model := Branches(), find_unused_parameters=False)
    model(torch.ones(1, 10)).sum().backward()


def of_mlp(config="fp32", **options):
    """After the refusal the same model can be given to another reducer."""
    model = Mlp()
    try:
        reducer_of(model, config, **options)
    finally:
        reducer_of(model).detach()


PARAMETER = nn.Parameter(torch.zeros(3))
TWICE = [("a", PARAMETER), ("a", nn.Parameter(torch.zeros(4)))]
TAKEN = "a DistributedDataParallel already synchronizes the parameter 'layers.0.weight'"
ARGUMENTS = [
    (lambda _: reducer_of(DistributedDataParallel(Mlp())), "TypeError ... ddp.module"),
    (lambda _: reducer_of(Mlp().parameters()), "TypeError ... named_parameters()"),
    (lambda _: reducer_of(3), "TypeError ... named_parameters()"),
    (lambda _: reducer_of([("a", 3)]), "TypeError ... named_parameters()"),
    (
        lambda _: reducer_of([("a", torch.zeros(3, dtype=torch.int64))]),
        "ValueError ... no parameters that could have gradients",
    ),
    (lambda _: reducer_of(TWICE), "ValueError ... two parameters with the name 'a'"),
    (lambda _: reducer_of([("a", PARAMETER * 2)]), "ValueError ... 'a' is the result of a computation"),
    (
        lambda _: reducer_of([*TWICE[:1], ("b", nn.Parameter(torch.zeros(3, device="meta")))]),
        "RuntimeError ... ['cpu', 'meta']",
    ),
    (lambda _: of_mlp("int9"), "ValueError: ... 'int9'"),
    *(
        (
            functools.partial(lambda config, value, _: of_mlp(config, bucket_mib=value), config, value),
            f"ValueError: ... bucket_mib={value!r} is not possible: use a number of MiB greater than 0",
        )
        for config, value in (("fp32", 0), ("auto", -1), ("fp32", "fast"))
    ),
    (lambda _: of_mlp(find_unused_parameters=1), "ValueError: ... find_unused_parameters=1"),
    (lambda _: of_mlp(fusedcomm.Config(wires={"layer.*": "fp32"})), "ValueError: ... 'layer.*'"),
    (
        lambda _: (model := Mlp(), kept := reducer_of(model), reducer_of(model), kept),
        "ValueError ... a fusedcomm.GradReducer already synchronizes the parameter 'layers.0.weight'",
    ),
    (
        lambda _: (model := Mlp(), kept := reducer_of(model), reducer_of([("mine", model.layers[0].weight)]), kept),
        "ValueError ... already synchronizes the parameter 'mine'",
    ),
    (of_ddps_module, f"ValueError ... {TAKEN}"),
    (ddps_on_rank_1, f"DisagreementError: fusedcomm: rank 1 / ValueError ... {TAKEN}"),
    (ddp_over_reduced, "RuntimeError ... a DistributedDataParallel synchronizes the parameter layers. ... too"),
    (
        sparse_without_module,
        "RuntimeError ... the gradient of embedding.weight is sparse ... must be given the module",
    ),
    (unused, "RuntimeError ... brought no gradient for never.bias, never.weight"),
]
if hasattr(PARAMETER, "grad_dtype"):
    ARGUMENTS.append((other_dtype, "RuntimeError ... the gradient of weights.0 is Float and the parameter is BFloat16"))


def of_shape(shape, dtype=torch.float32):
    reducer_of(Gradients((50, 2), shape, dtype=dtype))


def of_count(count):
    reducer_of(Gradients(*[(3,)] * count))


def named(name):
    reducer_of(nn.ModuleDict({name: Gradients((50, 2))}))


AGREE = "DisagreementError ... the ranks do not agree ..."
DIFFERENT = [
    (
        differ(of_shape, {"shape": (3,)}, {"shape": (4,)}),
        f"{AGREE} parameters.list[1][1][0] is 3 on rank 0 and 4 on rank 1",
    ),
    (differ(of_shape, {"shape": (3,)}, {"shape": (3,), "dtype": torch.float64}), f"{AGREE} float64"),
    (differ(of_count, {"count": 2}, {"count": 3}), f"{AGREE} parameters.count is 2 on rank 0"),
    (strides, f"{AGREE} reducer.strides.weights.0"),
    (differ(named, {"name": "a"}, {"name": "of_rank_1"}), f"{AGREE} of_rank_1"),
    (
        differ(of_mlp, {"bucket_mib": 1}, {"bucket_mib": 2}),
        f"{AGREE} reducer.bucket_mib is 1 on rank 0 and 2 on rank 1",
    ),
    (differ(of_mlp, {"config": "auto"}, {"config": "fp32"}), f"{AGREE} wire is 'auto' on rank 0 and 'fp32' on rank 1"),
]
ROWS = [
    *rows("GradReducer", 0, [(lambda _: fusedcomm.GradReducer(Mlp()), "RuntimeError: ... init_process_group")]),
    *rows("GradReducer", 2, ARGUMENTS),
    *rows("GradReducer", 3, DIFFERENT, is_same=True),
]
