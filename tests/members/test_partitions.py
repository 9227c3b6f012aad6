"""Cut links between hosts, which are network namespaces: at most one side goes on, and the other stops by name."""

import contextlib
import itertools
import os
import subprocess

import pytest
from crew import Crew
from sampling import few

SILENCE_S = 1.5


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def problem() -> str:
    """Why there can be no namespaces; empty if there can."""
    name = f"fcp{os.getpid()}"
    try:
        ip(f"netns add {name}")
        ip(f"link add {name} type bridge")
        ip(f"link del {name}")
        ip(f"netns del {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs network namespaces: {error}"
    return ""


PROBLEM = problem()
pytestmark = pytest.mark.skipif(PROBLEM != "", reason=PROBLEM)


_NETWORKS = itertools.count()


class Network:
    """Hosts h0, h1, … with the addresses 10.77.0.1, 10.77.0.2, …, each on one of two bridges."""

    def __init__(self, num_hosts: int) -> None:
        # A deleted namespace's links go later, so no name is used twice.
        self.prefix, self.num_hosts = f"f{os.getpid() % 100000}n{next(_NETWORKS)}", num_hosts

    def __enter__(self) -> "Network":
        for side in range(2):
            ip(f"link add {self.prefix}b{side} type bridge")
            ip(f"link set {self.prefix}b{side} up")
        for host in range(self.num_hosts):
            name = self.host(host)
            ip(f"netns add {name}")
            ip(f"link add {name} type veth peer name eth0 netns {name}")
            ip(f"-n {name} addr add 10.77.0.{host + 1}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
            ip(f"link set {name} up")
        self.split([])
        return self

    def __exit__(self, *_) -> None:
        for host in range(self.num_hosts):
            for command in (f"link del {self.host(host)}", f"netns del {self.host(host)}"):
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip(command)
        for side in range(2):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(f"link del {self.prefix}b{side}")

    def host(self, index: int) -> str:
        return f"{self.prefix}h{index}"

    def split(self, apart: list[int]) -> None:
        """Moves these hosts to the second bridge."""
        for host in range(self.num_hosts):
            ip(f"link set {self.host(host)} master {self.prefix}b{int(host in apart)}")


class Hosts(Crew):
    """A crew with one process on each host."""

    def __init__(self, folder, network: Network, **settings) -> None:
        self.network = network
        super().__init__(folder, network.num_hosts, silence_s=SILENCE_S, **settings)

    def of(self, name: str) -> dict:
        rank = int(name[1:])
        return {"host": f"10.77.0.{rank + 1}", "network": self.network.host(rank)}


def sides() -> list[tuple[int, tuple[int, ...]]]:
    """All ways to part 2, 3 and 4 ranks: (number of ranks, those apart from rank 0)."""
    return [
        (num_ranks, apart)
        for num_ranks in (2, 3, 4)
        for num_apart in range(1, num_ranks)
        for apart in itertools.combinations(range(1, num_ranks), num_apart)
    ]


@pytest.mark.parametrize(
    "parting",
    few(sides(), (4, (2, 3))),
)
def test_one_side_goes_on(tmp_path, parting):
    num_ranks, apart = parting
    here = [rank for rank in range(num_ranks) if rank not in apart]
    go_on = here if 2 * len(here) >= num_ranks else list(apart)
    stop = [rank for rank in range(num_ranks) if rank not in go_on]
    with Network(num_ranks) as network, Hosts(tmp_path, network) as crew:
        crew.wait_steps([f"m{rank}" for rank in range(num_ranks)], num_ranks)
        network.split(list(apart))
        crew.wait_steps([f"m{rank}" for rank in go_on], len(go_on))
        for rank in stop:
            error = crew.wait_error(f"m{rank}")
            assert error["kind"] == "MinorityError", error
            assert all(f"{other} (" in error["text"] for other in go_on), error
        network.split([])
        crew.wait_steps([f"m{rank}" for rank in go_on], len(go_on))


def test_a_short_cut_expels_nobody(tmp_path):
    with Network(2) as network, Hosts(tmp_path, network) as crew:
        crew.wait_steps(["m0", "m1"], 2)
        network.split([1])
        network.split([])
        crew.wait_steps(["m0", "m1"], 2)
        assert len(crew.events("m0", "view")) == 1
