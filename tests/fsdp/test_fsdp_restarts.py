"""torchrun restarts the ranks of an FSDP2 model after one was killed, and they go on from the last checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

JOB = Path(__file__).with_name("restarted_job.py")
ROOT = JOB.parents[2]


def trained(folder: Path, killed_at: int) -> list[dict]:
    """What the ranks have found. killed_at: the step in which the first attempt's rank 1 is killed; -1: none."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run = subprocess.run(
        [*torchrun, str(JOB), str(folder), str(killed_at)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_a_restarted_training_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    whole = trained(tmp_path / "whole", -1)
    restarted = trained(tmp_path / "restarted", 9)
    assert [each["attempt"] for each in whole + restarted] == [0, 0, 1, 1]
    assert [each["began_at"] for each in whole + restarted] == [0, 0, 8, 8]
    assert len({each["digest"] for each in whole + restarted}) == 1
