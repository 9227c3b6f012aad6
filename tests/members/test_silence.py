"""Ranks that stand still, and cut links between hosts: at most one side goes on, and the other stops by name."""

import contextlib
import itertools
import signal
import subprocess
import time

import pytest
from on_hosts import namespaces, needs_hosts
from patience import patient
from sampling import few
from trainees import Endless

pytestmark = pytest.mark.check


def test_a_rank_that_stood_still_is_expelled_but_not_shortly_or_together_with_all_others(team):
    silence = patient(2)
    run = team(Endless, silence=silence)
    run.wait_steps("0", "1", "2")
    for names, seconds in (("1", silence / 4), ("012", 1.5 * silence)):
        run.signal(signal.SIGSTOP, *names)
        time.sleep(seconds)
        run.signal(signal.SIGCONT, *names)
        run.wait_steps("0", "1", "2")
        assert run.steps("0")[-1]["view"] == 0
    run.signal(signal.SIGSTOP, "0")
    run.wait_steps("1", "2")
    run.signal(signal.SIGCONT, "0")
    error = run.failure("0")
    assert error.startswith("ExpelledError") and f"and silence is {silence} s" in error, error
    assert "it stood still for " in error and "holds Python's interpreter: then give Members(silence=…) more" in error
    run.wait_steps("1", "2")
    run.check_steps()


def test_of_two_the_higher_rank_stops_by_name_when_the_lower_is_silent(team):
    run = team(Endless, num_founders=2, silence=patient(1))
    run.wait_steps("0", "1")
    run.signal(signal.SIGSTOP, "0")
    error = run.failure("1")
    assert error.startswith("MinorityError") and "silent ranks 0 " in error, error


def sides() -> list[tuple[int, tuple[int, ...]]]:
    """All ways to part 2, 3 and 4 ranks: (number of ranks, those apart from rank 0)."""
    return [
        (num_ranks, apart)
        for num_ranks in (2, 3, 4)
        for num_apart in range(1, num_ranks)
        for apart in itertools.combinations(range(1, num_ranks), num_apart)
    ]


@pytest.fixture
def network():
    """network(num_hosts): (the hosts of Script, a function that joins the ports of some of them by another bridge)."""
    with contextlib.ExitStack() as made:

        def make(num_hosts: int):
            hosts = made.enter_context(namespaces.make_network(num_hosts, bits_s=None)).hosts
            switch = hosts[0].namespace.replace(hosts[0].name, "switch")

            def ip(command: str) -> None:
                subprocess.run(["ip", "-netns", switch, *command.split()], check=True)

            def part(apart: tuple[int, ...]) -> None:
                for host in apart:
                    ip(f"link set port{host} master other")

            ip("link add other type bridge")
            ip("link set other up")
            return {str(rank): (host.namespace, host.address) for rank, host in enumerate(hosts)}, part

        yield make


@needs_hosts
@pytest.mark.parametrize("parting", few(sides(), (4, (2, 3))))
def test_one_side_goes_on(team, network, parting):
    num_ranks, apart = parting
    here = [str(rank) for rank in range(num_ranks) if rank not in apart]
    go_on = here if 2 * len(here) >= num_ranks else list(map(str, apart))
    hosts, part = network(num_ranks)
    run = team(Endless, num_founders=num_ranks, hosts=hosts, silence=patient(2))
    run.wait_steps(*hosts)
    part(apart)
    run.wait_steps(*go_on)
    for rank in hosts.keys() - go_on:
        error = run.failure(rank)
        assert error.startswith("MinorityError") and all(f"{other} (" in error for other in go_on), error
    run.wait_steps(*go_on)
    run.check_steps()
