"""The ranks' digests: a bit that changes on the way ends training by name, in the next step."""

import datetime
import os
import random
import threading

import pytest
import torch
import torch.distributed as dist
from flipping_proxy import HEADER_NBYTES, Flip, FlippingProxies
from models import Gradients, integers, mean_of_integers, synchronized
from patience import patient
from sampling import few

from fusedcomm.config import Checks, Config
from fusedcomm.native import _C

SHAPES = (300, 70), (500,), (90, 200)
STEPS = 6
ARMED = 2
TWO_SHOT = Config("int8", sum="two-shot")
TIMEOUT_S = 30


def begun(rank, config, front_end):
    """What runs the forward pass, its handle, and this rank's gradients."""
    model = Gradients(*SHAPES)
    module, comm = synchronized(front_end, model, config, bucket_mib=0.1)
    return module, comm, [integers(rank, shape) for shape in SHAPES]


def steps(rank, world_size, config, front_end="hook", between=None):
    """Steps until an error. Returns (the step of the error, or the last one; its text; the last comparison of digests;
    the gradients of the last step without an error)."""
    module, comm, gradients = begun(rank, config, front_end)
    text, means = "", []
    for step in range(STEPS):
        if step == ARMED and between is not None:
            between()
        module.zero_grad()
        try:
            module(gradients).backward()
        except RuntimeError as error:
            text = str(error)
            break
        means = [weight.grad.clone() for weight in getattr(module, "module", module).weights]
    found = comm.session.synchronizer.last_digests()
    return step, text, found and (found.last_pass, found.outvoted, found.links, found.means), means


def steps_through(rank, world_size, ports, config, front_end):
    """steps() in a group whose connections pass the proxies. Bits are flipped from the step ARMED on."""
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore("127.0.0.1", ports[rank], is_master=False)
        timeout = datetime.timedelta(seconds=patient(TIMEOUT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

        def arm():
            store.set(f"ready/{rank}", "")
            store.wait(["armed"])

        return steps(rank, world_size, config, front_end, between=arm)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def flipped(ranks, flip, config=TWO_SHOT, front_end="hook"):
    """The outcomes of two ranks, between which one bit changes."""
    for _ in range(3):  # now and then ranks do not connect through proxies: see flipping_proxy.py
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with FlippingProxies(server.port) as proxies:
            has_begun = threading.Event()

            def arm(server=server, proxies=proxies, has_begun=has_begun):
                server.wait(["ready/0", "ready/1"])
                has_begun.set()
                proxies.flip = flip
                server.set("armed", "")

            threading.Thread(target=arm, daemon=True).start()
            outcomes = ranks.outcomes(steps_through, proxies.ports, config, front_end, world_size=2)
        if has_begun.is_set():
            break
    assert flip.done.is_set(), outcomes
    return outcomes


def check_flipped(outcomes, sender):
    """Both ranks ended with one text, in the step after the flip, and know the link as data."""
    assert [kind for kind, _ in outcomes] == ["value", "value"], outcomes
    (step, text, found, _), (other_step, other_text, other_found, _) = (value for _, value in outcomes)
    assert text and (step, text, found) == (other_step, other_text, other_found)
    last_pass, outvoted, links, means = found
    assert step == last_pass + 1 and step > ARMED
    assert text.startswith("fusedcomm: bits changed on the way between ranks in step ")
    assert "restore a checkpoint from before that step on all ranks" in text
    of_means = means[0] != means[1]
    assert outvoted == ([0, 1] if of_means else [])
    assert links == [(sender, 1 - sender, of_means)]
    kind = "means" if of_means else "gradients"
    assert f"{kind} were damaged from rank {sender} to rank {1 - sender}" in text
    return of_means


# A step sends one message of gradients and one of means. Those of step ARMED + 2 are the last that a step follows.
@pytest.mark.parametrize("seed", few(range(50), 0))
def test_a_bit_that_changes_between_two_ranks_ends_the_next_step_by_name(ranks, seed):
    drawn = random.Random(seed)
    sender = seed % 2
    flip = Flip(sender, skipped=drawn.randrange(6), position=drawn.random())
    check_flipped(flipped(ranks, flip, front_end=("hook", "reducer", "DataParallel")[seed % 3]), sender)


def test_a_bit_of_gradients_and_one_of_means_are_told_apart(ranks):
    kinds = {check_flipped(flipped(ranks, Flip(0, skipped=skipped)), 0) for skipped in range(3)}
    assert kinds == {True, False}


@pytest.mark.full
def test_a_one_shot_notices_it_too(ranks):
    outcomes = flipped(ranks, Flip(1), Config("int8", sum="one-shot"))
    (step, text, (last_pass, outvoted, links, means), _), (_, other, _, _) = (value for _, value in outcomes)
    assert text == other and step == last_pass + 1 > ARMED
    assert outvoted == [0, 1] and links == [(1, 0, False)]
    assert "the ranks received different means" in text and "gradients were damaged from rank 1 to rank 0" in text


# What gloo adds it may have received damaged: then all ranks have the same sum. What it sends on may arrive damaged at
# one rank: then their results differ.
@pytest.mark.parametrize("wire, sum", [("fp32", "exact"), pytest.param("bf16", "direct", marks=pytest.mark.full)])
def test_results_of_the_transport_never_differ_in_silence(ranks, wire, sum):
    noticed = []
    for skipped in range(4):
        outcomes = flipped(ranks, Flip(1, skipped=skipped), Config(wire, sum=sum))
        (step, text, found, means), (_, other, _, others) = (value for _, value in outcomes)
        assert text == other
        noticed.append(text != "")
        if text:
            assert step == found[0] + 1 > ARMED and found[1] == [0, 1] and found[2] == []
        else:
            assert all(torch.equal(mean, other_mean) for mean, other_mean in zip(means, others, strict=True))
    assert True in noticed and False in noticed


# Fields of gloo's header: the length, the kind, the slot, the offset, the length again.
@pytest.mark.parametrize("field", few(range(5)))
def test_a_bit_of_a_header_ends_training_within_the_timeout(ranks, field):
    outcomes = flipped(ranks, Flip(0, in_header=True, position=(8 * field + 1.5) / HEADER_NBYTES))
    for kind, value in outcomes:
        assert kind != "value" or value[1].startswith("fusedcomm: "), outcomes


def test_without_digests_nobody_notices(ranks):
    outcomes = flipped(ranks, Flip(0, skipped=1), Config("int8", sum="two-shot", checks=Checks(digest=False)))
    assert [value[:3] for _, value in outcomes] == [(STEPS - 1, "", None)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "wire, sum", [("int8", "two-shot"), ("bf16", "one-shot"), ("fp32", "exact"), ("bf16", "direct")]
)
def test_ranks_that_received_the_same_agree(ranks, world_size, wire, sum):
    found = ranks.run(steps, Config(wire, sum=sum), world_size=world_size)
    for step, text, (last_pass, outvoted, links, means), gradients in found:
        assert (step, text, last_pass, outvoted, links) == (STEPS - 1, "", STEPS - 2, [], [])
        assert len(set(means)) == 1 and means[0] != 0
        assert means == found[0][2][3]
        for gradient in gradients:
            torch.testing.assert_close(gradient, mean_of_integers(world_size, gradient.shape), rtol=0.02, atol=0.1)


# ---- what the ranks conclude


def compared(means, sent=None, received=None, passes=(7, 7)):
    """The comparison of ranks with these digests. sent, received: {(rank, other): digest}, where not 0."""
    size = len(means)
    rows = torch.zeros(size, 2 + 2 * size, dtype=torch.int64)
    rows[:, 1] = torch.tensor(means)
    for column, links in ((2, sent or {}), (2 + size, received or {})):
        for (rank, other), digest in links.items():
            rows[rank, column + other] = digest
    return _C.compare_digests(rows, *passes)


def test_the_rank_that_most_differ_from_is_outvoted():
    found = compared([5, 5, 9, 5])
    assert found.outvoted == [2] and not found.agrees
    text = found.text()
    assert "in step 7 since" in text
    assert "rank 2 received other means than most ranks (CRC-32C 5 on ranks 0, 1 and 3, 9 on rank 2)" in text


@pytest.mark.parametrize("means, outvoted", [([1, 2], [0, 1]), ([1, 2, 2, 1], [0, 1, 2, 3]), ([3, 1, 2, 1], [0, 2])])
def test_without_most_ranks_all_are_named(means, outvoted):
    assert compared(means).outvoted == outvoted


def test_a_link_is_named_where_sender_and_receiver_differ():
    gradients, both = 1 << 32, (1 << 32) + 1
    found = compared([4, 4, 4], sent={(0, 2): both, (1, 0): 7}, received={(2, 0): gradients, (0, 1): 7})
    assert found.links == [(0, 2, True)] and found.outvoted == []
    assert "means were damaged from rank 0 to rank 2" in found.text()
    found = compared([4, 4, 4], sent={(0, 2): both}, received={(2, 0): 1}, passes=(3, 5))
    assert found.links == [(0, 2, False)] and "in step 3 to 5 since" in found.text()


def test_what_agrees_is_no_problem():
    assert compared([4, 4], sent={(0, 1): -9}, received={(1, 0): -9}).agrees


# ---- options


def test_a_device_without_digests_refuses_them_by_name():
    with pytest.raises(ValueError, match=r"^fusedcomm: Checks\(digest=True\) is not possible for gradients on cuda"):
        Config("int8", checks=Checks(digest=True)).refuse_on("cuda")
    for digest in (None, False):
        Config("int8", checks=Checks(digest=digest)).refuse_on("cuda")
    Config("int8", checks=Checks(digest=True)).refuse_on("cpu")


def test_the_option_is_a_flag():
    with pytest.raises(ValueError, match=r"Checks\(digest\)=1 is not possible: use True or False"):
        Checks(digest=1)


def state_of(rank, world_size):
    module, comm, gradients = begun(rank, Config("int8"), "hook")
    module(gradients).backward()
    comm.session.synchronizer.compare_digests()
    return comm.session.synchronizer.last_digests().last_pass


def test_ranks_can_compare_between_two_passes(ranks):
    assert ranks.run(state_of, world_size=2) == [0, 0]
