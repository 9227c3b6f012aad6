"""The timeline shows each tensor's phases, while the job runs and after."""

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from jobs import job, raised

import fusedcomm.horovod as hvd
from fusedcomm.horovod import timeline
from fusedcomm.horovod.order import Request
from fusedcomm.horovod.signature import Signature


def phases(text: str) -> dict[str, set[str]]:
    """The phases of each name in a timeline."""
    events = json.loads(text)
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            found[names[event["pid"]]].add(event["name"])
    return found


def wait_for(path: Path, text: str) -> None:
    while text not in path.read_text():
        time.sleep(0.005)


def check_variable(rank, size, folder):
    path = Path(folder) / "timeline.json"
    with job(HOROVOD_TIMELINE=str(path), HOROVOD_TIMELINE_MARK_CYCLES="1"):
        for _ in range(3):
            hvd.allreduce(torch.ones(3), name="weights")
        hvd.allgather(torch.ones(3), name="rows")
        if rank == 0:
            wait_for(path, "allgather.rows")  # before the job ends
    if rank == 0:
        found = phases(path.read_text())
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= found["allreduce.weights"]
        assert {"NEGOTIATE_ALLGATHER", "ALLGATHER"} <= found["allgather.rows"]
        assert any("CYCLE_START" in each for each in found.values())
    with job(HOROVOD_TIMELINE=str(path)):
        hvd.barrier()


def test_a_variable_names_the_timelines_file_of_the_first_job(ranks, tmp_path):
    ranks.run(check_variable, str(tmp_path), world_size=2)
    first, second = (phases((tmp_path / name).read_text()) for name in ("timeline.json", "timeline.2.json"))
    assert "allreduce.weights" in first and "allreduce.weights" not in second
    assert len(list(tmp_path.iterdir())) == 2


def check_calls(rank, size, folder):
    first, second = Path(folder) / "first.json", Path(folder) / "second.json"
    with job():
        hvd.stop_timeline()
        for path in (first, second):
            hvd.start_timeline(path)
            hvd.start_timeline(path)
            hvd.allreduce(torch.ones(3), name=path.stem)
            hvd.barrier()
            hvd.stop_timeline()
        hvd.allreduce(torch.ones(3), name="unseen")
        if rank == 0:
            assert "allreduce.first" in phases(first.read_text())
            names = set(phases(second.read_text()))
            assert "allreduce.second" in names and not names & {"allreduce.first", "allreduce.unseen"}
            kind, _ = raised(hvd.start_timeline, Path(folder) / "none" / "such.json")
            assert kind == "FileNotFoundError"


def test_timelines_can_be_started_and_stopped(ranks, tmp_path):
    ranks.run(check_calls, str(tmp_path), world_size=2)


def test_a_timeline_that_cannot_be_written_ends_with_one_warning(tmp_path):
    writer = timeline.Writer(tmp_path / "timeline.json", None, mark_cycles=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.warns(UserWarning, match=r"timeline\.json, the timeline, ends early") as told:
            for _ in range(2):
                writer.ended([Request(0, Signature("allreduce", "a" * 1000))])
            writer.end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(told) == 1
