"""One rank of bench/probe_check.py, which starts it and reads what rank 0 writes."""

import argparse
import copy
import json
import statistics
import sys

import torch
import torch.distributed as dist
from _common import Row, percentiles
from _ddp_step_rank import OPTIMIZERS, Bench, Runner, Task
from _ways import COMPUTE, TOLERANCES, Way

from fusedcomm.probe import report
from fusedcomm.probe.choices import OFF, Option, predict_option, recommend
from fusedcomm.probe.command import ACCEPT
from fusedcomm.probe.run import Findings, Settings, probe
from fusedcomm.probe.speed import slowed


def name_of(option: Option) -> str:
    return f"{option.name} {option.cap_mb:g}"


def way_of(option: Option) -> Way:
    """As the probe writes it, whose DDP has its own gradient_as_bucket_view."""
    tolerance = TOLERANCES["fp32" if option.wire == OFF else option.wire]
    return Way(
        name_of(option), lambda ddp, group: option.way.attach(ddp), tolerance, option.own_cap_mb, bucket_views=False
    )


def run_probe(bench: Bench, arguments: argparse.Namespace) -> Findings:
    task = Task(copy.deepcopy(bench.model))
    optimizer = OPTIMIZERS[arguments.optimizer](task.parameters())
    wires = tuple(arguments.wires)
    settings = Settings(seconds=arguments.seconds, wires=wires, accept=wires, caps_mb=tuple(arguments.caps))
    return probe(settings, dist.group.WORLD, torch.device("cpu"), (task, lambda module: module(bench.batch), optimizer))


def rows_of(
    bench: Bench, runners: dict[str, Runner], options: dict[str, Option], findings: Findings, slowdown: float
) -> list[Row]:
    """`slowdown`: compute alone beside these steps, over what it was in the probe."""
    workload, cluster = slowed((findings.workload, findings.cluster), slowdown)
    rows = []
    for name, runner in runners.items():
        if runner.way is None:
            continue
        option, seconds = options[name], sorted(runner.step_s)
        prediction, median_s = option.prediction, statistics.median(seconds)
        then = predict_option(workload, cluster, option.way, option.cap_mb).prediction
        figures = {
            "predicted_s": prediction.step_s,
            "ratio": prediction.step_s / median_s,
            "ratio_at_speed": then.step_s / median_s,
            "predicted_network_s": prediction.network_s,
            "predicted_sent_nbytes": prediction.sent_nbytes,
            "error": runner.error,
        }
        if runner.sent_nbytes:
            figures["wire_nbytes"] = statistics.median(runner.sent_nbytes)
        rows.append(
            Row(
                *(bench.case, name, bench.numel, 4 * bench.numel, median_s, seconds[0], True),
                percentiles_s=percentiles(seconds),
                figures=figures,
            )
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    results, text = sys.argv[1:]
    arguments = argparse.Namespace(**json.loads(text))
    bench = Bench(arguments, results)
    bench.begin("the probe")
    findings = run_probe(bench, arguments)
    bench.say(report.text(findings))
    options = {name_of(option): option for option in findings.options}
    recommendation = findings.recommendation
    bench.report.extra["recommended"] = name_of(recommendation.option)
    bench.report.extra["by_default"] = {
        "recommended": name_of(recommend(findings.options, ACCEPT).option),
        "among": [name for name, option in options.items() if option.wire in (OFF, *ACCEPT)],
    }
    document = report.as_json(findings)
    for sample in document["network"]["samples"]:
        sample["seconds"] = [round(value, 6) for value in sample["seconds"]]
    bench.report.extra["case"] = {
        "compute_s": findings.workload.compute_s,
        "reason": recommendation.reason,
        "probe": document,
    }
    runners = {COMPUTE: bench.compute}
    for name, option in options.items():
        runner = bench.make(way_of(option))
        if runner is not None:
            runners[name] = runner
    for index in range(arguments.rounds):
        names = list(runners)
        first = index % len(names)
        for name in names[first:] + names[:first]:
            bench.turn(runners[name], arguments.steps, also_sync=False)
        bench.say(f"{bench.case}: round {index + 1} of {arguments.rounds}")
        compute_s = statistics.median(bench.compute.step_s)
        slowdown = compute_s / findings.workload.compute_s
        bench.report.rows = rows_of(bench, runners, options, findings, slowdown)
        bench.report.extra["case"]["compute_alone_s"] = compute_s
        bench.report.write()
    for runner in runners.values():
        runner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
