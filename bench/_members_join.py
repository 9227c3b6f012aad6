"""Hosts of bench/members.py --parts join: three train, a fourth joins over links of a given rate."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lib.common import Report, Row
from lib.namespaces import make_network, problem
from torch import nn

WIDTH, NUM_FOUNDERS, WARM_STEPS = 1024, 3, 5


def join(arguments: argparse.Namespace, report: Report) -> None:
    """Measures one join at each rate."""
    for mbit_s in arguments.mbit:
        reason = problem()
        if reason:
            report.missing("join", f"{mbit_s} Mbit/s", reason, failed=False)
            continue
        found = run_hosts(mbit_s, arguments)
        rate = 8 * found["nbytes"] / found["fetch_s"] / 1e6
        found |= {"share_of_line": rate / mbit_s, "load": os.getloadavg()[0]}
        case = f"join/{mbit_s} Mbit/s"
        numel, checked = int(arguments.join_params), found.pop("same_bits")
        report.add(
            [Row(case, "members", numel, found["nbytes"], found["fetch_s"], found["fetch_s"], checked, figures=found)]
        )
        print(
            f"{case}: {found['nbytes'] / 1e6:.0f} MB of state in {found['fetch_s']:.2f} s, "
            f"{found['share_of_line']:.2f} of the line; the others' longest step {found['longest_step_s']:.2f} s, "
            f"the usual one {found['step_s']:.2f} s",
            flush=True,
        )


def run_hosts(mbit_s: int, arguments: argparse.Namespace) -> dict:
    """What the joiner and the founders have found."""
    with tempfile.TemporaryDirectory() as folder, make_network(NUM_FOUNDERS + 1, round(mbit_s * 1e6)) as network:
        processes = []
        for place, host in enumerate(network.hosts):
            options = {"folder": folder, "place": place, "host": host.address, "params": arguments.join_params}
            command = network.command(host, [sys.executable, __file__, json.dumps(options)])
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        try:
            statuses = [process.wait(arguments.timeout) for process in processes]
        finally:
            for host in network.hosts:
                network.kill(host)
        if any(statuses):
            raise SystemExit(f"members.py: hosts ended with {statuses}")
        told = [json.loads((Path(folder) / f"told{place}").read_text()) for place in range(NUM_FOUNDERS + 1)]
    found, founders = told[-1], told[:-1]
    found["same_bits"] = len({each.pop("digest") for each in told}) == 1
    steps = [step_s for each in founders for step_s in each["steps_s"]]
    return found | {"longest_step_s": max(steps), "step_s": statistics.median(steps)}


def host(options: argparse.Namespace) -> None:
    """A host's process."""
    from _members_rank import digest_of

    import fusedcomm
    from fusedcomm.members import state

    fetched: list[tuple[int, float]] = []
    content = state.Transfer.content

    def timed(transfer: state.Transfer, nbytes: int, num_parts: int) -> torch.Tensor:
        began = time.perf_counter()
        found = content(transfer, nbytes, num_parts)
        fetched.append((nbytes, time.perf_counter() - began))
        return found

    state.Transfer.content = timed  # type: ignore[method-assign]
    folder, joins = Path(options.folder), options.place == NUM_FOUNDERS
    torch.manual_seed(options.place)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(options.params / WIDTH**2)))])
    if joins:
        while not (folder / "address").exists():
            time.sleep(0.05)
        members = fusedcomm.Members(join=(folder / "address").read_text())
    else:
        store = dist.FileStore(str(folder / "store"), NUM_FOUNDERS)
        dist.init_process_group("gloo", store=store, rank=options.place, world_size=NUM_FOUNDERS)
        members = fusedcomm.Members(host=options.host)
    parallel = fusedcomm.DataParallel(model, config="int8", members=members, quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    members.carry(optimizer=optimizer)
    steps_s: list[float] = []
    num_after = 0
    while num_after < 2:  # steps with the host that joins
        began = time.perf_counter()
        optimizer.zero_grad()
        parallel(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - began)
        num_after += members.size > NUM_FOUNDERS
        if options.place == 0 and members.step == WARM_STEPS:
            (folder / "new").write_text(members.address)
            (folder / "new").rename(folder / "address")
    told: dict[str, object] = {"digest": digest_of(model), "steps_s": steps_s[2:]}
    if joins:
        told |= {"nbytes": sum(nbytes for nbytes, _ in fetched), "fetch_s": sum(taken_s for _, taken_s in fetched)}
    (folder / f"told{options.place}").write_text(json.dumps(told))
    members.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    host(argparse.Namespace(**json.loads(sys.argv[1])))
