"""A script that trains with members until the file "stop" exists: what test_run_members.py and the like start.

Arguments: a folder. Each process writes there, after each step, `<process>.now`: its step, size, launcher's words, and
a digest of its parameters.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

import fusedcomm

NUMEL = 1000


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    members = fusedcomm.Members(join="auto", min_ranks=1)
    weights = torch.nn.Parameter(torch.zeros(NUMEL))
    comm = fusedcomm.GradReducer([("weights", weights)], "fp32", members=members, quiet=True)
    optimizer = torch.optim.SGD([weights], lr=0.5, momentum=0.5)
    members.carry(optimizer=optimizer)
    signs = torch.arange(NUMEL) % 5 - 2.0
    while True:
        optimizer.zero_grad()
        gradient = signs * (members.step + 1)
        gradient[0] = float((folder / "stop").exists())
        (weights * gradient).sum().backward()
        must_stop = bool(weights.grad[0] > 0)  # the same on all ranks
        optimizer.step()
        digest = hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest()[:12]
        now = {"step": members.step, "size": members.size, "digest": digest, "slot": os.environ.get("LOCAL_RANK")}
        now |= {"join": members.joins, "changes": len(comm.stats().changes)}
        new = folder / f"{os.getpid()}.new"
        new.write_text(json.dumps(now))
        new.rename(folder / f"{os.getpid()}.now")
        if must_stop:
            break
    members.leave()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
