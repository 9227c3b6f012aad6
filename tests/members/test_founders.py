"""Ranks that die before the first step: the others name them, or begin without them and with the same parameters."""

import itertools

import pytest
import torch
import torch.distributed as dist
from trainees import Rank, Script, wait_for

import fusedcomm
from fusedcomm.members.training.views import Views
from fusedcomm.reducer import data_parallel

pytestmark = pytest.mark.check


class Founder(Rank):
    """A rank of a job whose store is rank 0's. Moments to die: "founding" its Members,
    "broadcast", the first of DataParallel without members, and "asked", in place of a step the number of a request for
    its state."""

    def __init__(self, script: Script, name: str, address: str | None) -> None:
        super().__init__(script, name, address)
        self.net, (number, moment) = torch.nn.Linear(4, 4), script.die.get(name, (0, ""))
        for parameter in self.net.parameters():
            parameter.data.fill_(float(name))
        if moment == "asked":
            find, numbers = Views._find_state, itertools.count(1)
            Views._find_state = lambda *asked: self.die() if next(numbers) == number else find(*asked)
        if moment == "broadcast":
            data_parallel._sync_module_states = lambda **_: self.die()
        members = self.members if script.config["has_members"] else None
        self.model = fusedcomm.DataParallel(self.net, config="fp32", members=members, quiet=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def store(self) -> dist.Store:
        is_host = self.name == "0"
        if not is_host:
            wait_for(self.folder / "0.port")
        port = 0 if is_host else torch.load(self.folder / "0.port")
        store = dist.TCPStore("127.0.0.1", port, is_master=is_host, wait_for_workers=False)
        if is_host:
            self.write("port", store.port)
        return store

    def run(self) -> None:
        self.write("first", torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()]))
        for _ in range(4):  # in which a rank meets the view that another one waits for
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizer.step()


@pytest.mark.parametrize(("victim", "moment"), [("0", "founding"), ("1", "founding"), ("0", "broadcast")])
def test_a_founder_that_dies_before_the_first_state_is_named(team, victim, moment):
    run = team(Founder, config={"has_members": False}, die={victim: (0, moment)})
    for name in {"0", "1", "2"} - {victim}:
        error = run.failure(name)
        assert error.startswith(f"PeerLostError: fusedcomm: rank {name} of 3: rank {victim} "), error
        assert "is lost, and this rank waits for it while" in error


# Before another rank has the state, and when perhaps one has it.
@pytest.mark.parametrize("number", [1, 4])
def test_founders_begin_equal_though_the_first_is_lost(team, number):
    run = team(Founder, config={"has_members": True}, die={"0": (number, "asked")})
    first = run.read("1", "first")
    assert torch.equal(first, run.read("2", "first")) and first.unique().tolist() in ([0.0], [1.0])


def test_founders_have_the_first_ranks_state(team):
    run = team(Founder, config={"has_members": True})
    assert [run.read(name, "first").unique().tolist() for name in "012"] == [[0.0]] * 3
