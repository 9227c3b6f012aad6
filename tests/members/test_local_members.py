"""LocalSteps with members: lost ranks, and ranks that join, against a plain simulation."""

import dataclasses
import types
from dataclasses import dataclass

import pytest
import torch
from local_jobs import InSeconds, Job, flat, until_arrived
from plain_simulation import Run, simulated
from trainees import Rank, Script

import fusedcomm
from fusedcomm.local_steps import windows

pytestmark = pytest.mark.check

RUN = Run(every=4, delay=1)


@dataclass
class MergeScript(Script):
    """die: by name, (step, moment): "before" the optimizer's step, or "handed", once a message of that step, or of
    the next that has one, is with the engine. A run in seconds has a clock that advances by one in each step."""

    run: Run = RUN


class Merger(Rank):
    script_kind = MergeScript

    def __init__(self, script: MergeScript, name: str, address: str | None) -> None:
        super().__init__(script, name, address)
        if address is None:  # as after a checkpoint: the steps that are waited for are those since
            self.members.load_state_dict({"step": 100, "num_microbatches": 0})
        self.job: Job | None = None
        if isinstance(script.run, InSeconds):
            windows.time = types.SimpleNamespace(
                monotonic=lambda: 0 if self.job is None else self.job.comm.progress.steps
            )
        place = script.num_founders if self.joins else int(name)
        self.job = Job(script.run, place, fusedcomm.Config(**script.config), members=self.members)
        self.members.carry(optimizer=self.job.optimizer)
        self.write("ready", {"address": self.members.address, "steps": self.job.comm.progress.steps})
        send = self.job.comm.messages.send

        def send_and_die(pending) -> None:
            send(pending)
            step, moment = script.die.get(name, (0, ""))
            if moment == "handed" and self.job.comm.progress.steps >= step:
                self.die()

        self.job.comm.messages.send = send_and_die

    def run(self) -> None:
        comm = self.job.comm
        while comm.progress.steps < self.script.run.steps:
            step = comm.progress.steps + 1
            self.wait_before(step)
            self.job.train([step])
            until_arrived(comm)
            self.write(f"step.{step}", {"parameters": flat(self.job.model), "merged": self.job.merged()})
        comm.finish()
        changes = [vars(change) for change in comm.stats().changes]
        self.write("end", {"parameters": flat(self.job.model), "changes": changes, "size": self.members.size})


def results(run):
    """What each rank that is left has written: {name: ({step: …}, end)}."""
    found = {}
    for name in run.processes.keys() - run.script.die.keys():
        ended = run.read(name, "end")
        first = run.read(name, "ready")["steps"] + 1
        steps = {step: run.read(name, f"step.{step}") for step in range(first, run.script.run.steps + 1)}
        found[name] = (steps, ended)
    return dict(sorted(found.items()))


def fits(run, found, takes_part, joins=None) -> bool:
    """joins: the message before which the joiner, the last rank of the simulation, joins; None: there is none."""
    num_founders = run.script.num_founders
    joined = {} if joins is None else {num_founders: joins}
    expected = simulated(run.script.run, num_founders + len(joined), takes_part, joined)
    for name, (steps, _) in found.items():
        for step, told in steps.items():
            plain = expected[num_founders if name == "j" else int(name)].seen[step]
            for ours, theirs in zip((told["parameters"], told["merged"]), plain, strict=True):
                if (ours - theirs).abs().max() > 2e-6 * theirs.abs().max():
                    return False
    return True


def same_on_all(found) -> None:
    (first, ended), *others = found.values()
    for steps, end in others:
        assert torch.equal(end["parameters"], ended["parameters"])
        for step, told in steps.items():
            assert torch.equal(told["merged"], first[step]["merged"]), step


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("victim", ["0", "2"])
@pytest.mark.parametrize(("step", "moment"), [(6, "before"), (8, "handed"), (8, "before"), (9, "before")])
def test_the_others_go_on_without_a_rank_that_is_killed(team, victim, step, moment, delay):
    of_run = dataclasses.replace(RUN, delay=delay, steps=18)
    run = team(Merger, config={"wire": "fp32"}, run=of_run, die={victim: (step, moment)})
    found = results(run)
    same_on_all(found)
    assert all(end["size"] == 2 and len(end["changes"]) == 1 for _, end in found.values())
    # The messages of steps 4 and 8 are 0 and 1. Whoever dies with one under way is in it if a survivor has its mean.
    possible = {(6, "before"): [0, 1], (8, "before"): [1], (8, "handed"): [1, 2], (9, "before"): [1, 2]}[step, moment]
    assert any(
        fits(run, found, lambda rank, message, last=last: rank != int(victim) or message < last) for last in possible
    )


def merges_of(steps) -> list[torch.Tensor]:
    """The merged states that a rank had, one after another."""
    merged = [steps[step]["merged"] for step in sorted(steps)]
    return [each for i, each in enumerate(merged) if i == 0 or not torch.equal(each, merged[i - 1])]


@pytest.mark.parametrize("moment", ["before", "handed"])
def test_windows_of_time_go_on_without_a_rank_that_is_killed_and_with_one_that_joins(team, moment):
    script = {"num_founders": 2, "meets": 3, "die": {"0": (24, moment)}}
    run = team(Merger, config={"wire": "fp32"}, run=InSeconds(4, delay=0, steps=28), **script)
    run.join("j", of="1")
    found = results(run)
    ended = {name: end for name, (_, end) in found.items()}
    assert torch.equal(ended["j"]["parameters"], ended["1"]["parameters"])
    assert [each["size"] for each in ended.values()] == [2, 2]
    # In a window of time each rank makes its own steps, so only what they merge is the same, one merge after another.
    # The last may come within the other rank's finish(), after its last step.
    merged, of_joiner = (merges_of(found[name][0]) for name in ("1", "j"))
    first = next(i for i, each in enumerate(merged) if torch.equal(each, of_joiner[0]))
    assert len(of_joiner) > 2 and len(merged) - first + 1 >= len(of_joiner)
    for ours, theirs in zip(merged[first:], of_joiner, strict=False):
        assert torch.equal(ours, theirs)


@pytest.mark.sampled
@pytest.mark.parametrize("moment", ["before", "handed", None])
@pytest.mark.parametrize("delay", [0, 3])
def test_a_rank_joins_with_the_merged_state_and_without_weight_in_its_first_merge(team, delay, moment):
    """With a `moment`, a founder is lost later."""
    of_run = Run(every=4, delay=delay, steps=28)
    die = {"0": (24, moment)} if moment else {}
    run = team(Merger, config={"wire": "fp32"}, run=of_run, num_founders=2, meets=3, die=die)
    run.join("j", of="1")
    found = results(run)
    same_on_all(found)
    steps, end = found["j"]
    assert end["size"] == 3 - len(die) and [len(change["lost"]) for change in end["changes"]] == [1] * len(die)
    first = (min(steps) - 1) // RUN.every - 1

    def takes_part(rank: int, message: int, last: int) -> bool:
        return message > first if rank == 2 else rank != 0 or not die or message < last

    # The message of step 24 is number 5.
    assert any(fits(run, found, lambda *of, last=last: takes_part(*of, last), first) for last in (5, 6))


def test_lossy_merges_stay_the_same_on_all_when_a_rank_is_lost(team):
    config = {"wire": "int8"}
    of_run = Run(every=4, delay=3, steps=14, width=100)
    same_on_all(results(team(Merger, config=config, run=of_run, die={"1": (8, "handed")})))


def test_a_process_with_another_schedule_is_sent_away(team):
    run = team(Merger, run=dataclasses.replace(RUN, steps=4), num_founders=2, hold={"0": 2, "1": 2})
    run.join("j", of="1", run=dataclasses.replace(RUN, every=5))
    failure = run.failure("j")
    assert "JoinRefusedError" in failure and "every is 4 on the members' ranks and 5 on this one" in failure
