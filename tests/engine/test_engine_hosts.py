"""Sums on two levels: where they are chosen, by which ranks' hosts, and what the plan says of it. Some ranks pretend to
share a host."""

import pytest
import torch
from models import Gradients, on_host, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, TwoLevels
from fusedcomm.devices.cpu import CpuPath
from fusedcomm.session import session

TWO_BY_TWO = [[0, 1], [2, 3]]
TWICE = "abab"
ONE_LEVEL = "sums have one level, not two: "

LEVELS = [
    # A rank sends as many bytes to its host's other rank before and after, and to the other host between.
    (TWICE, {}, "2 hosts × 2 ranks, bf16 inside a host", "two-shot", 1 / 3),
    (TWICE, {"wire": "fp16"}, "2 hosts × 2 ranks, fp16 inside a host", "two-shot", 1 / 3),
    (TWICE, {"wire": "fp32"}, ONE_LEVEL + "wire='fp32' keeps the bits of DDP's own all-reduce", "exact", 1),
    (TWICE, {"wire": "fp32", "sum": "two-shot"}, "2 hosts × 2 ranks, fp32 inside a host", "two-shot", 1 / 3),
    (TWICE, {"sum": "direct"}, ONE_LEVEL + "sum='direct' has one", "direct", 1),
    # A ring goes on at every rank's neighbour: host by host it leaves a host once.
    ("aabb", {"wire": "fp32"}, ONE_LEVEL + "wire='fp32' keeps the bits of DDP's own", "exact", 1 / 2),
    ("aaab", {"wire": "fp32"}, ONE_LEVEL + "host a has 3 ranks, host b 1", "exact", (1 / 3, 1 / 3, 1 / 3, 1)),
    # Two of the three other ranks are on the other host.
    (TWICE, {"sum": "one-shot"}, ONE_LEVEL + "sum='one-shot' has one", "one-shot", 2 / 3),
    (TWICE, {"sum": "two-shot", "hosts": None}, "sum two-shot, 4 ranks", "two-shot", 2 / 3),
    ("aaaa", {}, ONE_LEVEL + "all 4 ranks are on one host", "two-shot", 0),
    ("aaaa", {"sum": "direct"}, ONE_LEVEL + "all 4 ranks are on one host", "direct", 0),
    ("aaaa", {"hosts": None}, "sum auto, 4 ranks", "two-shot", 0),
    ("abcd", {}, ONE_LEVEL + "every host has one rank", "two-shot", 1),
    (
        "aabc",
        {},
        ONE_LEVEL + "host a has 2 ranks, host b 1, and two need as many on every host (hosts='auto')",
        "two-shot",
        (2 / 3, 2 / 3, 1, 1),
    ),
    ("aabc", {"sum": "one-shot"}, ONE_LEVEL + "host a has 2 ranks, host b 1", "one-shot", (2 / 3, 2 / 3, 1, 1)),
    ("abbb", {"sum": "direct"}, ONE_LEVEL + "host a has 1 rank, host b 3", "direct", (1, 1 / 3, 1 / 3, 1 / 3)),
    # Hosts that the user names.
    ("aaaa", {"hosts": TWO_BY_TWO}, "2 hosts × 2 ranks, bf16 inside a host", "two-shot", 1 / 3),
    ("aaaa", {"hosts": [[0, 1, 2, 3]]}, ONE_LEVEL + "all 4 ranks are on one host", "two-shot", 0),
    ("aaaa", {"hosts": [[0], [1], [2], [3]]}, ONE_LEVEL + "every host has one rank", "two-shot", 1),
]
"""The host of each rank, options, what the plan says of levels, its sum, and the share of the bytes that go to other
hosts, of each rank or of all."""


def by_level(rank, world_size, rows):
    found = []
    for names, options, *_ in rows:
        with on_host(names[rank]):
            ddp = DistributedDataParallel(Gradients((300, 100)))
            comm = fusedcomm.attach(ddp, Config(**options))
        (seen,) = synchronize(ddp, [torch.full((300, 100), float(rank))], steps=2)
        plan, stats = comm.plan(), comm.stats()
        comm.detach()
        (row,) = plan.buckets
        assert stats.sent_nbytes == 2 * row.sent_nbytes
        if options.get("hosts", "auto") is not None:
            assert stats.sent_between_hosts_nbytes == 2 * row.sent_between_hosts_nbytes
        share = stats.sent_between_hosts_nbytes / stats.sent_nbytes
        found.append((str(plan), seen.unique().tolist(), row.sum, share))
    return found


@pytest.mark.parametrize("sixth", range(6))
def test_sums_have_two_levels_where_they_can_and_the_plan_says_why_not(ranks, subtests, sixth):
    rows = LEVELS[sixth::6]
    of_ranks = ranks.run(by_level, rows)
    for (names, options, levels, sum_, share), *on_ranks in zip(rows, *of_ranks, strict=True):
        with subtests.test(names=names, options=str(options)):
            shares = share if isinstance(share, tuple) else (share,) * 4
            for (text, values, used, sent_between), share_of_rank in zip(on_ranks, shares, strict=True):
                assert levels in text and values == [1.5] and used == sum_
                assert sent_between == pytest.approx(share_of_rank, rel=0.01)
                assert (ONE_LEVEL in text) == (ONE_LEVEL in levels)


def attached(rank, world_size, names, kwargs):
    """Attaches and takes a step. The error, or the plan's text and hosts."""
    try:
        with on_host(names[rank]):
            ddp = DistributedDataParallel(Gradients((5000,)))
            comm = fusedcomm.attach(ddp, Config(**{"wire": "int8", "wires": {"1d": "int8"}, **kwargs}))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", None
    (seen,) = synchronize(ddp, [torch.full((5000,), float(rank))])
    assert seen.unique().tolist() == [(world_size - 1) / 2]
    plan = comm.plan()
    comm.detach()
    return str(plan), plan.hosts and plan.hosts.groups


@pytest.mark.parametrize(
    ("names", "kwargs", "text"),
    [
        ("aaaa", {"hosts": [[0, 1]]}, "ValueError: … rank(s) [2, 3] are missing"),
        ("aaaa", {"hosts": [[0, 1], [2, 5]]}, "ValueError: … rank(s) [3] are missing"),
        ("aaa", {"hosts": [[0, 1], [2, 3]]}, "ValueError: … rank(s) [3] do not exist"),
        ("aab", {"hosts": TwoLevels()}, "ValueError: … host a has 2 ranks, host b 1"),
        ("a", {"hosts": "auto"}, f"{ONE_LEVEL}there is one rank"),
    ],
    ids=str,
)
def test_hosts_that_cannot_be_are_refused_on_every_rank(ranks, names, kwargs, text):
    for said, _ in ranks.run(attached, names, kwargs, world_size=len(names)):
        assert all(words in said for words in text.split(" … "))


def test_hosts_are_found_by_their_names_wherever_their_ranks_are(ranks):
    for text, groups in ranks.run(attached, "baab", {}):
        assert groups == ((0, 3), (1, 2))
        assert "2 hosts × 2 ranks" in text.splitlines()[0] and "MiB go to other hosts" in text


def with_a_path_for_one_level(rank, world_size, names):
    """Attaches through a path that has to be made again for two levels, as on cuda. Returns how often it was made."""
    made = []

    class Path(CpuPath):
        has_two_levels = False

        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "CpuPath", Path)
        attached(rank, world_size, names, {})
    return len(made)


def test_what_two_levels_need_is_prepared_only_where_sums_have_them(ranks):
    assert ranks.run(with_a_path_for_one_level, TWICE) == [2] * 4
    assert ranks.run(with_a_path_for_one_level, "aaaa") == [1] * 4


def test_a_simulation_takes_a_number_of_ranks_on_each_host():
    grads = [torch.randn(5003, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    by_number = fusedcomm.simulate(grads, Config("int4", hosts=2))
    assert torch.equal(by_number, fusedcomm.simulate(grads, Config("int4", hosts=TWO_BY_TWO)))
    assert not torch.equal(by_number, fusedcomm.simulate(grads, Config("int4", hosts=[[0, 2], [1, 3]])))
    one_level = fusedcomm.simulate(grads, "int4")
    for hosts in (1, 4, [[0], [1], [2], [3]], None):
        assert torch.equal(fusedcomm.simulate(grads, Config("int4", hosts=hosts)), one_level)
    refused = ((3, "hosts=3 ranks on each host"), (TwoLevels(), "in one process"), ([[0, 1], [2]], r"has 2 ranks"))
    for hosts, text in refused:
        with pytest.raises(ValueError, match=text):
            fusedcomm.simulate(grads, Config("int4", hosts=hosts))
