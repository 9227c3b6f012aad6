"""The α–β–γ model: cases with answers worked out by hand, and properties of all cases."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm import chunks
from fusedcomm.config import Chunks, Config
from fusedcomm.native import _C
from fusedcomm.tools.cluster import Cluster, Codec, Cost, Network, TwoLevels
from fusedcomm.tools.cost_model import (
    DEFAULT_CAP_NBYTES,
    FIRST_BUCKET_NBYTES,
    Choice,
    Gradient,
    Workload,
    cut_buckets,
    predict,
)

ALPHA, BETA = 1e-3, 1e-8
NETWORK = Network(Cost(ALPHA, BETA), Cost(ALPHA, BETA))
PACK, REDUCE, UNPACK, SUM = Cost(1e-5, 1e-9), Cost(2e-5, 2e-9), Cost(3e-5, 3e-9), Cost(4e-5, 4e-9)
CODEC = Codec(PACK, REDUCE, UNPACK, SUM)
CODECS = {wire: CODEC for wire in ("fp32", "bf16", "fp16", "int8", "fp8", "int4")}
COPY = 1e-10

NUMEL = 1 << 18


def linear_gradients(numels: list[int], backward_s: float) -> list[Gradient]:
    """Gradients in the order of the backward pass, which takes time in proportion to their numel."""
    total, done, gradients = sum(numels), 0, []
    for numel in numels:
        done += numel
        gradients.append(Gradient(numel, backward_s * done / total))
    return gradients


def cluster(world_size: int = 4, **changes) -> Cluster:
    """A cluster with more cores than it needs, so that only the chain of stages counts."""
    base = {"network": NETWORK, "codecs": CODECS, "copy_s_per_byte": COPY, "cores": 1e6}
    return Cluster(world_size, **{**base, **changes})


def one_bucket(numel: int = NUMEL, exempt_numel: int = 0, **changes) -> Workload:
    gradients = [Gradient(numel - exempt_numel, 0.2)]
    if exempt_numel:
        gradients.append(Gradient(exempt_numel, 0.2, exempt=True))
    return Workload(0.1, 0.2, 0.05, gradients, **changes)


def step_s(config: Config | None, ranks: Cluster, workload: Workload) -> float:
    """The predicted step in seconds, without compute and without the copies into and out of one bucket, which are the
    same for every choice."""
    step = predict(workload, Choice(config, 1 << 40), ranks).step_s
    return step - workload.compute_s - 2 * 4 * workload.numel * COPY


def chunks_of(config: Config, world_size: int, numel: int, device_type: str = "cpu") -> tuple[int, int]:
    layout = _C.plan_bucket(
        chunks.native(config, world_size, device_type), world_size, torch.empty(0), [(numel, 0)]
    ).layout
    return layout.num_chunks, layout.chunk_nbytes


# ---- one bucket, by hand


def test_ddp_alone_copies_and_reduces():
    sent = 2 * 3 / 4 * 4 * NUMEL
    assert step_s(None, cluster(), one_bucket()) == pytest.approx(ALPHA + sent * BETA)
    assert predict(one_bucket(), Choice(None, 1 << 40), cluster()).sent_nbytes == sent


def test_one_rank_sends_nothing():
    found = predict(one_bucket(), Choice(None), cluster(1, copy_s_per_byte=0.0))
    assert (found.step_s, found.sent_nbytes, found.bound) == (pytest.approx(0.35), 0, "compute")


def test_two_shot_of_one_chunk_is_the_sum_of_its_stages():
    config = Config(wire="bf16", chunks=Chunks(2 * NUMEL))
    assert chunks_of(config, 4, NUMEL) == (1, 2 * NUMEL)
    exchange = ALPHA + 3 / 4 * 2 * NUMEL * BETA
    by_hand = PACK(NUMEL) + exchange + REDUCE(NUMEL) + exchange + UNPACK(NUMEL)
    assert step_s(config, cluster(), one_bucket()) == pytest.approx(by_hand)


@pytest.mark.parametrize(("wire", "world_size", "sum"), [("bf16", 2, "auto"), ("int8", 4, "one-shot")])
def test_one_shot_of_one_chunk_is_an_all_gather_between_two_stages(wire, world_size, sum):
    """A rank sends as much as the engine's plan says: the whole chunk to every other rank."""
    config = Config(wire=wire, sum=sum, chunks=Chunks(2 * NUMEL))
    plan = _C.plan_bucket(chunks.native(config, world_size), world_size, torch.empty(0), [(NUMEL, 0)])
    sent = (world_size - 1) * plan.layout.chunk_nbytes
    assert (plan.sum, plan.layout.num_chunks) == ("one-shot", 1)
    assert step_s(config, cluster(world_size), one_bucket()) == pytest.approx(
        PACK(NUMEL) + ALPHA + sent * BETA + SUM(NUMEL)
    )
    found = predict(one_bucket(), Choice(config, 1 << 40), cluster(world_size))
    assert found.sent_nbytes == sent == plan.sent_nbytes


def test_exact_scales_and_reduces_in_place():
    by_hand = PACK(NUMEL) + ALPHA + 2 * 3 / 4 * 4 * NUMEL * BETA
    assert step_s(Config(wire="fp32"), cluster(), one_bucket()) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("cores", "in_flight", "by_hand"),
    [
        # A chunk's latency passes while the next chunk is sent, so latency counts once.
        (1e6, 8, lambda pack, sent, unpack: pack + 8 * sent + ALPHA + unpack),
        # A single workspace takes one chunk at a time.
        (1e6, 1, lambda pack, sent, unpack: 8 * (pack + sent + ALPHA + unpack)),
        # On an accelerator latency keeps the stream of collectives.
        (None, 8, lambda pack, sent, unpack: pack + 8 * (sent + ALPHA) + unpack),
    ],
)
def test_direct_chunks_follow_one_another_on_the_network(cores, in_flight, by_hand):
    config = Config(wire="bf16", sum="direct", chunks=Chunks(NUMEL // 4, in_flight))
    assert chunks_of(config, 4, NUMEL) == (8, NUMEL // 4)
    pack, sent, unpack = PACK(NUMEL / 8), 2 * 3 / 4 * (NUMEL // 4) * BETA, UNPACK(NUMEL / 8)
    assert sent > max(pack, unpack)  # so chunks queue for the network
    assert step_s(config, cluster(cores=cores), one_bucket()) == pytest.approx(by_hand(pack, sent, unpack))


def test_exact_buckets_take_no_workspace():
    gradients = [Gradient(NUMEL, 0.2)] * 3
    found = predict(
        Workload(0.1, 0.2, 0.0, gradients), Choice(Config(wire="fp32", chunks=Chunks(in_flight=1)), 1), cluster()
    )
    sent, copied = 2 * 3 / 4 * 4 * NUMEL * BETA, 4 * NUMEL * COPY
    by_hand = 0.3 + copied + PACK(NUMEL) + 3 * sent + ALPHA + copied
    assert found.num_buckets == 3
    assert found.step_s == pytest.approx(by_hand)


def test_on_few_cores_codec_lanes_take_turns():
    slow = {wire: Codec(*[Cost(0, 1e-6)] * 4) for wire in CODECS}
    config = Config(wire="bf16", sum="direct", chunks=Chunks(NUMEL // 4, in_flight=8))
    free = Network(Cost(0, 0), Cost(0, 0))
    numel = NUMEL / 8
    apart = step_s(config, cluster(codecs=slow, network=free), one_bucket())
    together = step_s(config, cluster(codecs=slow, network=free, cores=2.0), one_bucket())
    assert apart == pytest.approx(9 * numel * 1e-6)  # a chunk is packed while the one before is unpacked
    assert together == pytest.approx(16 * numel * 1e-6)


def test_exempt_elements_travel_in_fp32_and_are_packed():
    config = Config(wire="int8", chunks=Chunks(1 << 24))
    exempt = NUMEL // 2
    native = chunks.native(config, 4, "cpu")
    layout = _C.plan_bucket(native, 4, torch.empty(0), [(exempt, _C.EXACT_WIRE), (NUMEL - exempt, 0)]).layout
    assert layout.chunk_nbytes == 4 * exempt + (NUMEL - exempt) * (1 + 4 / 128)
    exchange = ALPHA + 3 / 4 * layout.chunk_nbytes * BETA
    by_hand = PACK(NUMEL) + exchange + REDUCE(NUMEL) + exchange + UNPACK(NUMEL)
    assert step_s(config, cluster(), one_bucket(exempt_numel=exempt)) == pytest.approx(by_hand)


# ---- several ranks on a host

LOCAL = Network(Cost(1e-4, 1e-9), Cost(2e-4, 2e-9))


def test_an_all_reduce_leaves_each_host_once_and_is_as_slow_as_the_slower_link():
    hosts = cluster(8, ranks_per_host=4, local=LOCAL)
    sent = 2 * 7 / 8 * 4 * NUMEL
    assert step_s(None, hosts, one_bucket()) == pytest.approx(ALPHA + 1e-4 + sent * BETA)
    assert predict(one_bucket(), Choice(None), hosts).sent_nbytes == sent


def test_one_level_sends_from_every_rank():
    config = Config(wire="bf16", chunks=Chunks(2 * NUMEL), hosts=None)
    exchange = ALPHA + 2e-4 + 4 * 4 / 8 * 2 * NUMEL * BETA
    by_hand = PACK(NUMEL) + exchange + REDUCE(NUMEL) + exchange + UNPACK(NUMEL)
    assert step_s(config, cluster(8, ranks_per_host=4, local=LOCAL), one_bucket()) == pytest.approx(by_hand)


def test_two_levels_sum_within_hosts_first():
    config = Config(wire="int8", wires={"1d": "int8"}, chunks=Chunks(2 * NUMEL), hosts="auto")
    plan = _C.plan_bucket(chunks.native(config, 8, "cpu", 4), 8, torch.empty(0), [(NUMEL, 0)])
    nbytes = plan.layout.chunk_nbytes
    assert (plan.layout.num_chunks, plan.host_layouts[0].chunk_nbytes) == (1, 2 * NUMEL)
    assert nbytes == NUMEL * (1 + 4 / 128)
    within = 2e-4 + 3 / 4 * 2 * NUMEL * 2e-9
    between = ALPHA + 4 * 1 / 2 * nbytes / 4 * BETA  # each of four ranks to one other host, a fourth
    back = 2e-4 + 3 / 4 * nbytes * 2e-9
    by_hand = PACK(NUMEL) + within + REDUCE(NUMEL) + between + REDUCE(NUMEL / 4) + between + back + UNPACK(NUMEL)
    hosts = cluster(8, ranks_per_host=4, local=LOCAL)
    assert step_s(config, hosts, one_bucket()) == pytest.approx(by_hand)
    sent = predict(one_bucket(), Choice(config, 1 << 40), hosts).sent_nbytes
    assert sent == 4 * plan.sent_between_hosts_nbytes(4, 1)


def test_sums_on_two_levels_have_networks_of_their_own():
    hosts = cluster(8, ranks_per_host=4, local=LOCAL)
    twice = Network(*[Cost(2 * ALPHA, 2 * BETA)] * 2), Network(*[Cost(4e-4, 4e-9)] * 2)
    own = dataclasses.replace(hosts, two_levels=TwoLevels(*twice))
    slower = dataclasses.replace(hosts, network=twice[0], local=twice[1])
    levels, flat = (Config(wire="int8", chunks=Chunks(2 * NUMEL), hosts=hosts) for hosts in ("auto", None))
    assert (
        step_s(levels, own, one_bucket()) == step_s(levels, slower, one_bucket()) > step_s(levels, hosts, one_bucket())
    )
    for config in (flat, None):
        assert step_s(config, own, one_bucket()) == step_s(config, hosts, one_bucket())


def test_a_ring_gathers_across_each_link_once():
    ring = dataclasses.replace(NETWORK, gather=Cost(ALPHA, BETA))
    local_ring = dataclasses.replace(LOCAL, gather=Cost(0.0, 2e-9))
    config = Config(wire="bf16", chunks=Chunks(2 * NUMEL), hosts=None)
    hosts = cluster(8, ranks_per_host=4, network=ring, local=local_ring)
    exchange = ALPHA + 2e-4 + 4 * 4 / 8 * 2 * NUMEL * BETA
    gather = ALPHA + 7 / 8 * 2 * NUMEL * BETA
    by_hand = PACK(NUMEL) + exchange + REDUCE(NUMEL) + gather + UNPACK(NUMEL)
    assert step_s(config, hosts, one_bucket()) == pytest.approx(by_hand)
    # Between hosts each of the four ranks has its own ring, so as many bytes leave the host as by an exchange.
    levels = Config(wire="int8", chunks=Chunks(2 * NUMEL), hosts="auto")
    exchanging = cluster(8, ranks_per_host=4, local=LOCAL)
    sent = [predict(one_bucket(), Choice(levels), ranks).sent_nbytes for ranks in (hosts, exchanging)]
    assert sent[0] == sent[1]


def test_the_faster_all_reduce_is_taken():
    tree = dataclasses.replace(NETWORK, all_reduce=Cost(1.0, BETA), tree=Cost(ALPHA, 2 * BETA))
    for numel, expected in ((NUMEL, ALPHA + 6 * NUMEL * 2 * BETA), (1 << 26, 1.0 + 6 * (1 << 26) * BETA)):
        assert step_s(None, cluster(network=tree), one_bucket(numel)) == pytest.approx(expected)


# ---- compute and collectives at the same time


def test_cores_limit_a_step():
    # Compute takes 0.35 s and the bytes take 0.5 core-seconds, on half a core.
    sent = 2 * 3 / 4 * 4 * NUMEL
    network = dataclasses.replace(NETWORK, cpu_s_per_byte=0.5 / sent)
    found = predict(one_bucket(), Choice(None), cluster(network=network, cores=0.5, copy_s_per_byte=0.0))
    assert found.step_s == pytest.approx((0.35 + 0.5) / 0.5)
    assert found.bound == "cores"
    both = cluster(network=network, cores=2.0, copy_s_per_byte=0.0)
    assert predict(one_bucket(busy_cores=2.0), Choice(None), both).step_s == pytest.approx((2 * 0.35 + 0.5) / 2)


@pytest.mark.parametrize("busy_cores, delayed", [(1.0, True), (0.5, False), (0.0, False)])
def test_bytes_delay_a_backward_pass_that_leaves_them_no_core(busy_cores, delayed):
    # There is one core. The first bucket's all-reduce keeps it busy for an eighth of the backward pass.
    reduced_s = ALPHA + 6 * NUMEL * BETA
    network = dataclasses.replace(NETWORK, cpu_s_per_byte=reduced_s / (6 * NUMEL))
    ranks = cluster(network=network, cores=1.0, copy_s_per_byte=0.0)
    gradients = [Gradient(NUMEL, reduced_s), Gradient(1, 8 * reduced_s)]
    workload = Workload(0.1, 8 * reduced_s, 0.0, gradients, busy_cores=busy_cores)
    of_last_s = ALPHA + 6 * BETA
    found = predict(workload, Choice(None, 4 * NUMEL), ranks)
    assert found.step_s == pytest.approx(workload.compute_s + delayed * reduced_s + of_last_s)


def test_ranks_of_a_host_share_the_work_of_sending():
    network = dataclasses.replace(NETWORK, cpu_s_per_byte=1e-6)
    hosts = cluster(8, ranks_per_host=4, network=network, local=LOCAL, cores=0.1, copy_s_per_byte=0.0)
    of_rank = 2 * 7 / 8 * 4 * NUMEL / 4 * 1e-6
    assert predict(one_bucket(), Choice(None), hosts).step_s == pytest.approx((0.35 + of_rank) / 0.1)


def test_collectives_slow_an_accelerator_down():
    # The first gradient is ready after a quarter of the backward pass, and reduced before its end.
    workload = Workload(0.1, 0.4, 0.0, [Gradient(NUMEL, 0.1), Gradient(1, 0.4)])
    plain = cluster(cores=None, copy_s_per_byte=0.0)
    slowed = dataclasses.replace(plain, slowdown=0.5)
    reduced_s = ALPHA + 6 * NUMEL * BETA
    choice = Choice(None, 4 * NUMEL)
    last_s = ALPHA + 6 * BETA
    assert predict(workload, choice, plain).step_s == pytest.approx(0.5 + last_s)
    assert predict(workload, choice, slowed).step_s == pytest.approx(0.5 + 0.5 * reduced_s + last_s)


# ---- buckets


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=40),
    cap=st.sampled_from([0, 1 << 10, 1 << 20, 3 << 20, DEFAULT_CAP_NBYTES]),
)
def test_buckets_are_cut_as_ddp_cuts_them(numels, cap):
    caps = [FIRST_BUCKET_NBYTES, cap] if cap == DEFAULT_CAP_NBYTES else [cap]
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
    gradients = linear_gradients(numels, 1.0)
    assert cut_buckets(gradients, cap) == [[gradients[index] for index in bucket] for bucket in indices]


# ---- properties

CHOICES = st.one_of(
    st.none(),
    st.builds(
        Config,
        wire=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
        chunks=st.builds(Chunks, st.sampled_from([None, 1 << 16, 1 << 20]), st.integers(1, 8)),
        hosts=st.none(),
    ),
    st.just(Config(wire="bf16", sum="direct")),
    st.just(Config(wire="int8", hosts="auto")),
)
WORKLOADS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20).map(
    lambda numels: Workload(0.01, 0.02, 0.001, linear_gradients(numels, 0.02))
)
CLUSTERS = st.builds(
    lambda hosts, per_host, alpha, beta, cores: cluster(
        hosts * per_host,
        network=Network(Cost(alpha, beta), Cost(alpha, beta)),
        ranks_per_host=per_host,
        local=LOCAL,
        cores=cores,
    ),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([0.0, 1e-4, 1e-2]),
    st.sampled_from([0.0, 1e-10, 1e-8]),
    st.sampled_from([None, 1.0, 16.0]),
)


@settings(max_examples=80, deadline=None)
@given(workload=WORKLOADS, config=CHOICES, ranks=CLUSTERS, cap=st.sampled_from([0, 1 << 20, 25 << 20]))
def test_bounds(workload, config, ranks, cap):
    found = predict(workload, Choice(config, cap), ranks)
    assert found.step_s >= max(found.compute_s, found.network_s) * (1 - 1e-9)
    assert found.bound in ("compute", "network", "codec", "latency", "cores")
    if config is not None and not (config.two_levels and 1 < ranks.ranks_per_host < ranks.world_size):
        sent = 0
        for bucket in cut_buckets(workload.gradients, cap):
            numel = sum(gradient.numel for gradient in bucket)
            device_type = "cuda" if ranks.cores is None else "cpu"
            native = chunks.native(config, ranks.world_size, device_type)
            sent += _C.plan_bucket(native, ranks.world_size, torch.empty(0), [(numel, 0)]).sent_nbytes
        if ranks.ranks_per_host == 1:
            assert found.sent_nbytes == pytest.approx(sent, rel=1e-6, abs=2 * found.num_buckets)


@settings(max_examples=60, deadline=None)
@given(workload=WORKLOADS, ranks=CLUSTERS, config=st.sampled_from([None, Config(wire="bf16", sum="direct")]))
def test_a_faster_network_is_never_slower(workload, ranks, config):
    """This holds with one collective for each chunk. If two collectives share a network, serving one sooner may delay
    another that matters more, as in any queue."""
    faster = Network(*(Cost(cost.fixed_s / 2, cost.per_unit_s / 2) for cost in [ranks.network.all_reduce] * 2))
    choice = Choice(config, 1 << 20)
    before = predict(workload, choice, ranks).step_s
    assert predict(workload, choice, dataclasses.replace(ranks, network=faster)).step_s <= before * (1 + 1e-9)


# ---- refusals


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"world_size": 0}, "0 ranks"),
        ({"ranks_per_host": 3, "local": LOCAL}, "4 ranks, 3 on each host"),
        ({"ranks_per_host": 2}, "needs the network within a host"),
        ({"cores": 0.0}, "cores=0.0"),
    ],
)
def test_refuses_clusters(changes, said):
    with pytest.raises(ValueError, match=said):
        cluster(**{"world_size": 4, **changes})


def test_names_a_stage_and_a_wire_without_costs():
    for codecs, said in (
        ({"bf16": Codec(PACK, REDUCE, UNPACK)}, "'sum' takes is not known"),
        ({"fp32": CODEC, "int8": CODEC}, "wire 'bf16' are known, only of fp32, int8"),
    ):
        with pytest.raises(ValueError, match=said):
            predict(one_bucket(), Choice(Config("bf16", "one-shot")), cluster(codecs=codecs))
