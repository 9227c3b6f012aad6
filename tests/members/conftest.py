"""Teams of processes that train, and members in the test's own process."""

import contextlib
import uuid

import pytest
from trainees import Rank, Team, Trainee

from fusedcomm.members.plane.control import ControlPlane


@pytest.fixture
def team(tmp_path):
    """team(kind, **script): the processes of a test, which end with it; see trainees.py."""
    with contextlib.ExitStack() as made:

        def make(kind: type[Rank] = Trainee, **script) -> Team:
            return made.enter_context(Team(kind, kind.script_kind(str(tmp_path), **script)))

        yield make


@pytest.fixture
def plane():
    """plane(job): a control plane, which ends with the test; without a job it can join. `options`: further ones."""
    with contextlib.ExitStack() as made:

        def make(job: str | None, uid: str = "", **options) -> ControlPlane:
            options = {"min_ranks": 1, "silence_s": 20.0, "host": "127.0.0.1", **options}
            new = ControlPlane(uid or uuid.uuid4().hex, {}, **options)
            made.callback(new.close)
            if job is not None:
                new.set_job(job)
            return new

        yield make
