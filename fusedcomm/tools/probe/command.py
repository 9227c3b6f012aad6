"""The arguments of ``fusedcomm probe``. Imports torch only once they are known to be possible."""

import argparse
import os
import time
from pathlib import Path

from fusedcomm import env, files
from fusedcomm.tools.arguments import COMPARED, accepted, add_wires_to, number
from fusedcomm.tools.errors import ProbeError, UsageError
from fusedcomm.tools.probe.script import script_path

MIN_SECONDS = 5
"""The smallest --seconds."""
DEFAULT_SECONDS, DEFAULT_PARAMS, DEFAULT_CAPS_MB = 60.0, 25e6, (5.0, 25.0, 100.0)
DEFAULT_JSON = Path("out/probe.json")
EXAMPLE = """torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id probe --rdzv-endpoint host0:29500 \\
    -m fusedcomm probe --script model.py    (the same line on every host)
fusedcomm probe --seconds 20                (two ranks on this machine, to see how it works)"""


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm probe`` to the commands."""
    probe = commands.add_parser(
        "probe",
        help="measure your cluster for a minute: which wire, if any, makes your step shorter, and by how much",
        description="Takes real steps of a model on torchrun's ranks with each wire, sum and bucket size, in turns,\n"
        "and recommends the fastest, or to leave it off.",
        example=EXAMPLE,
    )
    probe.add_argument("--script", metavar="PATH[:FUNCTION]", help="make() there returns (model, step[, optimizer])")
    probe.add_argument(
        "--params",
        metavar="N",
        type=number(least=1, below=1e13),
        help=f"without --script: elements of the synthetic model ({DEFAULT_PARAMS:g})",
    )
    probe.add_argument(
        "--backward-ms",
        metavar="MS",
        type=number(least=0, below=1e9),
        help="without --script: time of the synthetic model's backward pass; 0: only what writing its gradients takes "
        "(0)",
    )
    probe.add_argument(
        "--seconds",
        metavar="N",
        type=number(least=MIN_SECONDS, below=1e6),
        default=DEFAULT_SECONDS,
        help=f"about how long it may take, at least {MIN_SECONDS}; where starting the ranks takes long it is longer, "
        f"which is said first ({DEFAULT_SECONDS:g})",
    )
    add_wires_to(probe)
    probe.add_argument(
        "--caps",
        nargs="+",
        type=number(above=0),
        default=list(DEFAULT_CAPS_MB),
        metavar="MIB",
        help=f"bucket_cap_mb of DDP to compare ({' '.join(f'{cap:g}' for cap in DEFAULT_CAPS_MB)})",
    )
    probe.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        default=DEFAULT_JSON,
        help=f"file for all findings, whose folder is made ({DEFAULT_JSON})",
    )
    probe.set_defaults(run=_run, parser=probe)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    for option, value in (("--params", args.params), ("--backward-ms", args.backward_ms)):
        if args.script is not None and value is not None:
            raise UsageError(
                f"{option} {value:g} describes the synthetic step, and --script {args.script} has its own: use one"
            )
    wires = tuple(dict.fromkeys(args.wires or COMPARED))
    accept = accepted(wires, args.accept)
    world_size = env.launched_world_size()
    if world_size == 1:
        raise UsageError(
            "torchrun started one rank, which cannot send gradients to another: start at least two (--nnodes, "
            "--nproc-per-node), or run the probe without torchrun, which starts two on this machine"
        )
    try:
        if args.script is not None and world_size is None:  # ranks tell each other
            script_path(args.script)
    except ProbeError as error:
        raise UsageError(str(error)) from None
    if os.environ.get("RANK", "0") == "0":  # only rank 0 writes
        try:
            files.check_writable(args.json)
        except OSError as error:
            raise UsageError(f"--json {args.json} cannot be written ({error}): name another file") from None

    from fusedcomm.tools.probe.launch import Options, launch
    from fusedcomm.tools.probe.run import Settings

    settings = Settings(
        script=args.script,
        params=DEFAULT_PARAMS if args.params is None else args.params,
        backward_s=(args.backward_ms or 0.0) / 1e3,
        seconds=args.seconds,
        wires=wires,
        accept=accept,
        caps_mb=tuple(dict.fromkeys(args.caps)),
    )
    return launch(Options(settings, args.json, began))
