"""All-gathers and reduce-scatters of rows, on one level and on two, have the oracle's bits: every rank has each rank's
row as its encoder has rounded it, or the sum of the rows for it."""

import pytest
import reference
import torch
import torch.distributed as dist
from models import normal
from reference.elements import decode, encode
from reference.sums import slice_list, taken
from sampling import few

from fusedcomm.config import Chunks, Config, LocalOptions, TwoLevels
from fusedcomm.native import _C
from fusedcomm.session.session import Session

# (elements in a row, whether their wire is exact) of each piece of a row.
ROWS = {
    "lossy": [(5000, False)],
    "exact behind": [(2300, False), (77, True)],
    "exact between": [(33, False), (45, True), (1030, False), (7, True), (901, False)],
    "exact alone": [(413, True)],
    "one element": [(1, False)],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def own_row(rank, call, pieces, dtype):
    """Signed, over several binades."""
    row = normal(rank, call, (sum(numel for numel, _ in pieces),))
    return (row * torch.arange(len(row)).remainder(7).sub(3).float().exp2()).to(dtype)


def gathered(rank, world_size, config, pieces, own_dtype, dtype):
    """What this rank has of all rows after each of three all-gathers: [world_size, elements in a row]."""
    cpu = torch.device("cpu")
    session = Session(config, dist.group.WORLD, None, LocalOptions(), cpu, gathers_rows=True)
    named = [(f"piece {i}", numel, _C.EXACT_WIRE if exact else 0) for i, (numel, exact) in enumerate(pieces)]
    rows = _C.Rows(synchronizer=session.synchronizer, index=0, pieces=named)
    rows.set_row(list(range(len(pieces))))
    found = []
    for call in range(3):
        own = own_row(rank, call, pieces, own_dtype)
        before = own.clone()
        all_rows = torch.full((world_size * rows.row_numel,), torch.nan, dtype=dtype)
        rows.all_gather(rows=all_rows, own=own, is_last=True).wait()
        assert torch.equal(own, before)  # it is read only
        found.append(all_rows.view(world_size, -1))
    session.stop("the test has ended")
    return found


def rounded(row, config, pieces):
    """The oracle's fp32 values of a row behind its wires."""
    exact = torch.cat([torch.full((numel,), is_exact) for numel, is_exact in pieces])
    result = row.float().clone()
    places = slice_list(~exact, 2)  # rows have the same holes whatever their dtype is
    if len(places):
        values = taken(row, places).float()
        block = config.formats[0][1]
        decoded = decode(*encode(values, config.wire, block), config.wire, block)[: len(places)]
        result[places[places >= 0]] = decoded[places >= 0]
    return result


@pytest.mark.sampled
@pytest.mark.parametrize(("world_size", "hosts"), [(2, None), (3, None), (4, None), (4, 2)])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32")], ids="-".join)
@pytest.mark.parametrize("chunks", [Chunks(), Chunks(nbytes=4096, in_flight=2)], ids=["one", "several"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wire", few(["fp32", "bf16", "fp16", "int8", "fp8", "int4"], "fp32", "bf16", "int8", "int4"))
def test_every_rank_has_the_oracles_bytes_of_every_row(ranks, wire, name, chunks, dtypes, world_size, hosts):
    pieces = ROWS[name]
    if wire == "fp32":
        pieces = [(numel, True) for numel, _ in pieces]
    config = Config(wire, sum="two-shot", hosts=hosts, chunks=chunks)
    own_dtype, dtype = (DTYPES[each] for each in dtypes)
    outcomes = ranks.run(gathered, config, pieces, own_dtype, dtype, world_size=world_size)
    for found in outcomes:
        for call, of_all in enumerate(found):
            for rank, row in enumerate(of_all):
                expected = rounded(own_row(rank, call, pieces, own_dtype), config, pieces).to(dtype)
                assert torch.equal(row, expected), (call, rank)


def scattered(rank, world_size, config, pieces, dtype):
    """This rank's sums of three reduce-scatters of rows × 1/4, and the bytes that go to other hosts in one."""
    session = Session(config, dist.group.WORLD, None, LocalOptions(), torch.device("cpu"), reduces_rows=True)
    named = [(f"piece {i}", numel, _C.EXACT_WIRE if exact else 0) for i, (numel, exact) in enumerate(pieces)]
    rows = _C.Rows(synchronizer=session.synchronizer, index=0, pieces=named)
    rows.set_row(list(range(len(pieces))))
    found = []
    for call in range(3):
        for_ranks = [own_row(10 * rank + to, call, pieces, dtype) for to in range(world_size)]
        own = torch.full((rows.row_numel,), torch.nan)
        rows.reduce_scatter(rows=torch.cat(for_ranks), own=own, factor=0.25, is_last=True).wait()
        found.append(own)
    counted = session.stats().sent_between_hosts_nbytes
    session.stop("the test has ended")
    return found, counted, 3 * rows.plan(gathers=False).sent_between_hosts_nbytes(2, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [None, 2, TwoLevels(2, "fp16")], ids=str)
@pytest.mark.parametrize("dtype", few(DTYPES, "fp32"))
@pytest.mark.parametrize("chunks", [Chunks(), Chunks(nbytes=4096, in_flight=2)], ids=["one", "several"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_every_rank_has_the_oracles_sum_of_its_rows(ranks, wire, name, chunks, dtype, hosts):
    pieces = ROWS[name]
    config = Config(wire, sum="two-shot", hosts=hosts, chunks=chunks)
    exempt = torch.cat([torch.full((numel,), is_exact) for numel, is_exact in pieces])
    outcomes = ranks.run(scattered, config, pieces, DTYPES[dtype], world_size=4)
    for rank, (found, counted, planned) in enumerate(outcomes):
        for call, own in enumerate(found):
            rows = [own_row(10 * other + rank, call, pieces, DTYPES[dtype]) for other in range(4)]
            levels = {} if hosts is None else {"ranks_per_host": 2, "local_wire": config.local_wire}
            expected = reference.all_reduce_mean(
                [row.float() for row in rows],
                config.wire,
                "reduce-scatter",
                block=config.formats[0][1],
                exempt_mask=exempt,
                **levels,
            )
            assert torch.equal(own, expected), call
        assert counted == planned or hosts is None  # hosts are known to the counts by their names alone
