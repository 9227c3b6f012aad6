"""A bit that changes on its way between members: no rank goes on with other parameters, and none in silence."""

import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from sampling import few
from trainees import Script, Team, means_of

HERE = Path(__file__).resolve().parent
ARMED = 3
"""The step before which the bit may change."""
HEADER_NBYTES = 48


class Programs(Team):
    """A team whose ranks are programs; one of them has the library that flips a bit."""

    def _start(self, name, address):
        library = self.folder / "flip_recv.so"
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("c++")
            subprocess.run(
                [compiler, "-x", "c", "-shared", "-fPIC", "-O1", str(HERE / "flip_recv.c"), "-o", library, "-ldl"],
                check=True,
            )
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        if name == "2":
            environment |= {"LD_PRELOAD": str(library), "FLIP": str(self.folder / "flip")}
        code = (
            "import sys, trainees; trainees.main(trainees.Trainee, trainees.Script.of(sys.argv[1]), sys.argv[2], None)"
        )
        return Program([sys.executable, "-c", code, self.script.text(), name], env=environment)

    def end_of(self, name):
        """Waits until the rank has ended or failed; the error, empty without one."""
        while not any((self.folder / f"{name}.{what}").exists() for what in ("end", "failed")):
            assert self.processes[name].is_alive(), f"rank {name} ended with {self.processes[name].poll()}"
            threading.Event().wait(0.01)
        return self.failure(name) if (self.folder / f"{name}.failed").exists() else ""

    def told(self, name, step):
        """The parameters of a rank after a step; None if it has not ended the step."""
        path = self.folder / f"{name}.step.{step}"
        return torch.load(path)["parameters"] if path.exists() else None

    def has_right_means(self, name, step, names):
        """Whether the means of a step are those of three ranks or of the first two; None if it has not ended."""
        path = self.folder / f"{name}.step.{step}"
        if not path.exists():
            return None
        means = torch.load(path)["means"]
        return any(all(map(torch.equal, means, means_of(of, step, self.script.config))) for of in (names, names[:2]))


class Program(subprocess.Popen):
    """As a multiprocessing.Process."""

    def join(self, timeout):
        self.wait(timeout)

    def is_alive(self):
        return self.poll() is None


def case(number):
    """(least bytes, most bytes, how many to pass, position): a header of gloo's, or what follows it."""
    choose = random.Random(number)
    if number % 5 == 4:
        return HEADER_NBYTES, HEADER_NBYTES, choose.randrange(6), choose.random()
    return 400, 1 << 20, choose.randrange(12), choose.random()


@pytest.mark.parametrize("number", few(range(50), 0))
def test_a_bit_that_changes_is_noticed_in_the_next_step(tmp_path, number):
    config = {"wire": "int8"}
    team = Programs(
        Script(str(tmp_path), config=config, num_steps=12, timeout_s=15, hold={name: ARMED for name in "012"})
    )
    try:
        team.read("2", f"step.{ARMED - 1}")
        (tmp_path / "flip.new").write_text(" ".join(map(str, case(number))))
        (tmp_path / "flip.new").rename(tmp_path / "flip")
        (tmp_path / "go").touch()
        ends = {name: team.end_of(name) for name in "012"}
    finally:
        team.close()
    assert (tmp_path / "flip.done").exists()
    right = {name: [team.has_right_means(name, step, "012") for step in range(12)] for name in "012"}
    failed = {name: end for name, end in ends.items() if end}
    for name in ("0", "1"):
        steps = [step for step, is_right in enumerate(right[name]) if is_right is False]
        # A damaged part of the gradients reaches all ranks alike: all must have stopped in the next step.
        assert not steps or (len(failed) == 3 and steps == [right[name].index(None) - 1]), (ends, right)
    for step in range(12):
        told = [team.told(name, step) for name in "01" if right[name][step] is not None]
        assert all(torch.equal(a, b) for one in told for a, b in zip(one, told[0], strict=True)), (step, ends)
    if failed and len(failed) < 3:
        assert list(failed) == ["2"] and failed["2"].startswith("DamagedError"), ends
        wrong = [step for step, is_right in enumerate(right["2"]) if is_right is False]
        assert wrong in ([], [right["2"].index(None) - 1])  # none: a bit that no value is made of
    if not failed:  # the header was noticed at once, or its bit meant nothing
        assert all(all(steps) for steps in right.values()), right
