"""What fusedcomm.horovod refuses."""

import functools
import os
from collections.abc import Callable

import pytest
import torch
from refusals import rows

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Config
from fusedcomm.horovod.world import world

Call = Callable[[int], object]


def with_variables(call: Call, **variables: str) -> Call:
    """hvd.init() sets variables, too. They are as before afterwards."""

    def wrong(rank: int) -> None:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            call(rank)
        finally:
            os.environ.clear()
            os.environ.update(before)

    return wrong


def in_job(call: Call, process_sets: object = None, **variables: str) -> Call:
    """Makes the call in a job, whose next operation must work."""

    def wrong(rank: int) -> None:
        hvd.init(process_sets=process_sets)
        try:
            call(rank)
        finally:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
            hvd.barrier()
            hvd.shutdown()

    return with_variables(wrong, **variables)


ZEROS = torch.zeros(2)


def twice(_: int) -> None:
    first = hvd.allreduce_async(ZEROS, name="twice")
    try:
        hvd.allreduce_async(ZEROS, name="twice")
    finally:
        hvd.synchronize(first)


def on_gpus(*numbers: int, nccl: bool) -> Call:
    """Tensors on these GPUs, one after the other, with a torch that has NCCL or none."""

    def wrong(_: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
            for number in numbers:
                world().members[0].check(torch.device("cuda", number))

    return wrong


OPERATIONS = [
    (lambda _: hvd.allreduce(ZEROS.to("meta")), "a tensor on meta is not possible: it must be on cpu or cuda"),
    (on_gpus(0, nccl=False), "a tensor on cuda:0 needs NCCL ... use a torch with NCCL, or pass tensor.cpu()"),
    (on_gpus(0, 1, nccl=True), "a tensor on cuda:1 ... others of this rank were on cuda:0: each rank has one GPU"),
    (lambda _: hvd.allreduce([1.0]), "allreduce: expected a tensor, got list"),
    (lambda _: hvd.allreduce(ZEROS.to(torch.complex64)), "allreduce: a tensor of dtype torch.complex64"),
    (lambda _: hvd.allreduce(ZEROS.to(torch.uint8)), "allreduce: a tensor of dtype torch.uint8"),
    (lambda _: hvd.allreduce(torch.zeros(4, 4).t()[1:]), "allreduce: ... is not contiguous: pass tensor.contiguous()"),
    (lambda _: hvd.allreduce(torch.eye(3).to_sparse()), "allreduce: ... use sparse_allreduce_async()"),
    (lambda _: hvd.allreduce(ZEROS, average=True, op=hvd.Sum), "both average=True and op=1 ... use op=hvd.Average"),
    (lambda _: hvd.allreduce(ZEROS, op=9), "op=9 is not possible"),
    (lambda _: hvd.allgather(torch.tensor(1.0)), "allgather: a scalar has no first dimension"),
    (lambda _: hvd.reducescatter(torch.tensor(1.0)), "reducescatter: a scalar has no first dimension"),
    (lambda _: hvd.broadcast(ZEROS, 7), "root_rank=7 is not possible: it must be one of the ranks 0 to 1"),
    (lambda _: hvd.alltoall(torch.zeros(5)), "alltoall: 5 rows cannot be split evenly over 2 ranks"),
    (lambda _: hvd.alltoall(ZEROS, [2, 2]), "alltoall: splits=[2, 2] are not possible"),
    (lambda _: hvd.alltoall(ZEROS, [-1, 1]), "alltoall: splits=[-1, 1] are not possible ... none negative"),
    (lambda _: hvd.alltoall(ZEROS, [2]), "alltoall: splits=[2] are not possible ... one for each rank"),
    (lambda _: hvd.alltoall(ZEROS, torch.ones(2)), "alltoall: splits of dtype torch.float32 ... int32"),
    (
        lambda _: hvd.alltoall(ZEROS, [True, True]),
        "alltoall: splits=[True, True] is not possible: pass a list of whole",
    ),
    (lambda _: hvd.grouped_allreduce([]), "grouped allreduce: the list has no tensors"),
    (lambda _: hvd.grouped_allreduce(ZEROS), "grouped allreduce: expected a list of tensors"),
    (lambda _: hvd.poll(123456), "handle 123456 is not possible"),
    (lambda _: hvd.poll(None), "handle None is not possible"),
    (lambda _: hvd.synchronize(-1), "handle -1 is not possible"),
    (lambda _: hvd.synchronize(ZEROS), "handle tensor ... pass what allreduce_async() and the like have returned"),
    (lambda _: hvd.sparse_allreduce_async(ZEROS, "x"), "sparse_allreduce_async: ... layout torch.sparse_coo"),
    (lambda _: hvd.mpi_threads_supported(), "fusedcomm.horovod is built without MPI"),
    (lambda _: hvd.broadcast_parameters(iter([]), 0), "broadcast_parameters: ... list(model.named_parameters())"),
    (lambda _: hvd.broadcast_optimizer_state(torch.optim.LBFGS([ZEROS]), 0), "broadcast_optimizer_state: ... LBFGS"),
    (twice, "allreduce.twice is pending"),
]


def of_the_other_set(call: Callable) -> Call:
    def wrong(rank: int) -> None:
        sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
        in_job(lambda _: call(sets[1 - rank]), sets)(rank)

    return wrong


SETS = [
    (of_the_other_set(lambda other: hvd.allreduce(ZEROS, process_set=other)), "rank {rank} is not in ProcessSet("),
    (of_the_other_set(lambda other: hvd.barrier(process_set=other)), "rank {rank} is not in ProcessSet("),
    (of_the_other_set(lambda other: other.rank()), "rank {rank} is not in ProcessSet( ... only its members"),
]


def wrong_sets(*process_sets: object) -> Call:
    """init() with these sets, one choice for each rank. The next one must work."""

    def wrong(rank: int) -> None:
        try:
            hvd.init(process_sets=process_sets[rank % len(process_sets)])
        finally:
            assert not hvd.is_initialized()
            in_job(lambda _: None)(rank)

    return wrong


INITS = [
    (wrong_sets([[0, 9]]), "a process set of the ranks [0, 9] is not possible: ranks go from 0 to 1"),
    (wrong_sets([[]]), "a process set of the ranks [] is not possible"),
    (wrong_sets([[0], [0]]), "there is a process set of the ranks [0] already; its id is 1"),
    (wrong_sets([[0, 1]]), "there is a process set of the ranks [0, 1] already"),
    (wrong_sets("dynamic"), "hvd.init(process_sets='dynamic'): expected a list of process sets"),
    (wrong_sets([[0, 0]]), "ProcessSet([0, 0]): a rank appears twice"),
    (wrong_sets([[0]], [[1]]), "hvd.init(): the ranks do not agree: process_sets[0][0] is 0 on rank 0 and 1 on rank 1"),
    (in_job(lambda _: hvd.init(process_sets=[[0]])), "hvd.init() was called before with ... process_sets=[[0]]"),
    (lambda _: hvd.init([1, 0]), "hvd.init(comm=[1, 0]) is not possible ... process_sets"),
]

# ---- operations on which ranks do not agree


def differ(call: Callable, *args: object, **options: object) -> Call:
    """Of a pair of arguments, rank 1 gives the second. What ranks agree on works before and afterwards, and neither it
    nor the error is remembered."""

    def wrong(rank: int) -> None:
        def submit(is_other: bool) -> None:
            chosen = [each[is_other] if isinstance(each, tuple) else each for each in (*args, *options.values())]
            call(*chosen[: len(args)], **dict(zip(options, chosen[len(args) :], strict=True)), name="x")

        for _ in range(2):
            submit(False)
            with pytest.raises(hvd.HorovodInternalError):
                submit(rank == 1)
        submit(rank == 1)

    return in_job(wrong)


FOUR, COLUMN, COLUMNS = torch.zeros(4), torch.zeros(2, 1), torch.zeros(2, 2)
PAST_FIRST = "shape past the first dimension"
DISAGREEMENTS = [
    (call, f"its {what} is ... {one} on rank 0 ... {other} on rank 1")
    for call, what, one, other in [
        (differ(hvd.allreduce, (ZEROS, FOUR)), "shape", "[2]", "[4]"),
        (differ(hvd.allreduce, (ZEROS, COLUMN)), "shape", "[2]", "[2, 1]"),
        (differ(hvd.allreduce, (ZEROS, ZEROS.double())), "dtype", "float32", "float64"),
        (differ(hvd.allreduce, ZEROS, op=(hvd.Sum, hvd.Min)), "op", "Sum", "Min"),
        (differ(hvd.allreduce, ZEROS, prescale_factor=(1.0, 2.0)), "prescale_factor", "1", "2"),
        (differ(hvd.allreduce, ZEROS, postscale_factor=(1.0, 2.0)), "postscale_factor", "1", "2"),
        (differ(hvd.grouped_allreduce, ([ZEROS], [ZEROS, ZEROS])), "number of tensors", "1", "2"),
        (differ(hvd.allgather, (COLUMN, COLUMNS)), PAST_FIRST, "[2, 1]", "[2, 2]"),
        (differ(hvd.alltoall, (COLUMN, COLUMNS)), PAST_FIRST, "[2, 1]", "[2, 2]"),
        (differ(hvd.broadcast, ZEROS, (0, 1)), "root rank", "0", "1"),
        (differ(hvd.reducescatter, (ZEROS, FOUR)), "shape", "[2]", "[4]"),
    ]
]

# ---- compressions

WRONG_COMPRESSIONS = [
    ("int8", "pass hvd.Compression.int8"),
    ("int3", "hvd.Compression.of(fusedcomm.Config(wire=…))"),
    (None, "pass hvd.Compression.none"),
    (hvd.Compression, "hvd.Compression.int4"),
    (fusedcomm.Config("int8"), "pass hvd.Compression.of(config)"),
    (8, "compression=8, of type int, is no compressor"),
]


def optimizer_of(**options: object) -> torch.optim.Optimizer:
    model = torch.nn.Linear(2, 1)
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)


TAKE_COMPRESSIONS = [
    lambda wrong: hvd.grouped_allreduce([ZEROS], compression=wrong),
    lambda wrong: hvd.reducescatter(ZEROS, compression=wrong),
    lambda wrong: hvd.grouped_reducescatter([ZEROS], compression=wrong),
    lambda wrong: optimizer_of(compression=wrong),
]
COMPRESSIONS = [
    *(
        (functools.partial(lambda given, _: hvd.allreduce(ZEROS, compression=given), wrong), text)
        for wrong, text in WRONG_COMPRESSIONS
    ),
    *(
        (functools.partial(lambda call, _: call("int8"), call), "pass hvd.Compression.int8")
        for call in TAKE_COMPRESSIONS
    ),
]
OF_CONFIGS = [
    (
        lambda _: hvd.Compression.of(Config("int8", params="int8")),
        "params='int8'",
    ),
    (lambda _: hvd.Compression.of(Config(weighted="mean")), "weighted='mean' ... or use fusedcomm.GradReducer"),
    (lambda _: hvd.Compression.of("int8"), "config='int8' is not possible: use a fusedcomm.Config"),
]

# ---- the optimizer

MODEL = torch.nn.Linear(2, 1)


def named(*given: object) -> Call:
    return lambda _: hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters(), 0.1), list(given))


OPTIMIZERS = [
    *(
        (lambda _, call=call: call(hvd.Compression.int8), "wire='int8') sums gradients ... hvd.DistributedOptimizer")
        for call in TAKE_COMPRESSIONS[:-1]
    ),
    (
        lambda _: optimizer_of(op=hvd.Min, compression=hvd.Compression.int8),
        "wire='int8') is for op=hvd.Average and hvd.Sum: use hvd.Compression.none",
    ),
    (named(*MODEL.parameters()), "named_parameters must be pairs"),
    (named(*[("a", each) for each in MODEL.parameters()]), "named_parameters must have different names ... twice: a"),
    (named(("weight", MODEL.weight)), "named_parameters lack 1 of the optimizer's 2 parameters"),
    (lambda _: optimizer_of(backward_passes_per_step=0), "backward_passes_per_step=0 ... at least 1"),
    (
        lambda _: optimizer_of(op=hvd.Sum, gradient_predivide_factor=2.0),
        "gradient_predivide_factor=2.0 ... op=hvd.Average",
    ),
    (lambda _: optimizer_of(groups=0), "groups=0 is not possible"),
    (lambda _: optimizer_of(groups=[["x"]]), "groups: a group has a str; expected parameters"),
    (lambda _: optimizer_of(groups=[[MODEL.weight], [MODEL.weight]]), "groups: ... is in two groups"),
    (lambda _: hvd.DistributedOptimizer(optimizer_of()), "DistributedOptimizer: this SGD is a distributed optimizer"),
    (
        lambda _: hvd.DistributedOptimizer(torch.optim.SGD([ZEROS, ZEROS.to("meta")], 0.1)),
        "the optimizer's parameters are on several devices, cpu, meta: make a DistributedOptimizer for those of each",
    ),
]


def thaws(rank: int) -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(3 + rank):
        model.bias.requires_grad_(step == 2 + rank)
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()


def adds(rank: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    if rank == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


# ---- before hvd.init(), and what it reads

BEFORE = [hvd.rank, hvd.join, lambda: hvd.allreduce(ZEROS), lambda: hvd.broadcast_object(1)]
BEFORE += [lambda: hvd.start_timeline("x")]
READ = [
    (with_variables(lambda _: hvd.init(), **given), text)
    for given, text in [
        ({"HOROVOD_FUSION_THRESHOLD": "-1"}, "HOROVOD_FUSION_THRESHOLD='-1' is not possible: use a whole number"),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"}, "HOROVOD_STALL_CHECK_TIME_SECONDS='soon' ... use seconds"),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "nan"}, "HOROVOD_GLOO_TIMEOUT_SECONDS='nan' is not possible: use seconds"),
        ({"HOROVOD_ELASTIC": "perhaps"}, "HOROVOD_ELASTIC='perhaps' ... use 1 or 0"),
        (
            {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"},
            "RANK=None, WORLD_SIZE=None and HOROVOD_SIZE='2' do not say ... RANK",
        ),
        ({"WORLD_SIZE": "2"}, "RANK=None, WORLD_SIZE='2' and HOROVOD_SIZE='1' do not say which rank this is ... RANK"),
    ]
]


def wrong_on_rank_1(rank: int) -> None:
    with_variables(lambda _: hvd.init(), **({"HOROVOD_FUSION_THRESHOLD": "64M"} if rank == 1 else {}))(rank)


def after(start: str, given: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    return [(call, f"{start} ... {text}") for call, text in given]


def within_jobs(given: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    return [(in_job(call), text) for call, text in given]


INTERNAL = "HorovodInternalError: fusedcomm:"
OF_TWO = [
    *after("ValueError:", within_jobs(OPERATIONS + OPTIMIZERS) + SETS + INITS),
    *after("TypeError: fusedcomm.horovod:", within_jobs(COMPRESSIONS)),
    (
        in_job(lambda _: hvd.reducescatter(FOUR, op=hvd.Max)),
        "HorovodInternalError: reducescatter: ... op=Max is not possible",
    ),
    (
        in_job(thaws),
        f"{INTERNAL} the ranks do not train ... bias was True on rank 0 and False on rank 1 ... make a new hvd",
    ),
    (in_job(adds), f"{INTERNAL} the ranks do not have the same parameters: ... rank 0 has 2 and rank 1 has 3"),
]
OF_THREE = [
    (wrong_on_rank_1, "ValueError: hvd.init(): rank 1 cannot start: HOROVOD_FUSION_THRESHOLD='64M' ... whole number"),
]
ALONE = [
    *((lambda _, call=call: call(), "hvd.init()") for call in BEFORE),
    *OF_CONFIGS,
    *READ,
]
ROWS = [
    *rows("horovod", 2, OF_TWO),
    *rows("horovod", 2, after(f"{INTERNAL} the ranks do not agree on", DISAGREEMENTS), is_same=True),
    *rows("horovod", 3, OF_THREE),
    *rows("horovod", 0, after("ValueError:", ALONE)),
]
