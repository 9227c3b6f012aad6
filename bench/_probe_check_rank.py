"""One rank of bench/probe_check.py, which starts the ranks and reads the results that rank 0 writes."""

import argparse
import copy
import json
import statistics
import sys

import torch
import torch.distributed as dist
from _ddp_step_rank import OPTIMIZERS, Bench, Runner, Task
from lib.common import Row, percentiles
from lib.ways import COMPUTE, TOLERANCES, Way

from fusedcomm.ranks import groups
from fusedcomm.tools.arguments import ACCEPT
from fusedcomm.tools.probe import choices, report
from fusedcomm.tools.probe.choices import OFF, Option, predict_option
from fusedcomm.tools.probe.run import Findings, Settings, hosts_of, probe
from fusedcomm.tools.probe.speed import Speed
from fusedcomm.tools.probe.team import Team


def name_of(way: choices.Way, cap_mb: float) -> str:
    return f"{way.name} {cap_mb:g}"


def way_of(way: choices.Way, cap_mb: float) -> Way:
    """The probe's way as a way of bench/ddp_step.py. Like the probe's, its DDP has no bucket views."""
    return Way(
        name_of(way, cap_mb),
        lambda ddp, group: way.attach(ddp),
        TOLERANCES["fp32" if way.wire == OFF else way.wire],
        choices.own_cap_mb(cap_mb),
        bucket_views=False,
    )


def make_runners(bench: Bench, arguments: argparse.Namespace) -> dict[str, Runner]:
    """Runners by name: one that only computes, and one for each choice that the probe predicts."""
    runners = {COMPUTE: bench.compute}
    hosts, _ = hosts_of(Team(dist.group.WORLD, torch.device("cpu")))
    for cap_mb in arguments.caps:
        for way in choices.ways(arguments.wires, by_host=hosts is not None):
            runner = bench.make(way_of(way, cap_mb))
            if runner is not None:
                runners[name_of(way, cap_mb)] = runner
    return runners


def run_probe(bench: Bench, arguments: argparse.Namespace) -> Findings:
    task = Task(copy.deepcopy(bench.model))
    optimizer = OPTIMIZERS[arguments.optimizer](task.parameters())
    wires = tuple(arguments.wires)
    settings = Settings(seconds=arguments.seconds, wires=wires, accept=wires, caps_mb=tuple(arguments.caps))
    return probe(settings, dist.group.WORLD, torch.device("cpu"), (task, lambda module: module(bench.batch), optimizer))


def rows_of(bench: Bench, runners: dict[str, Runner], options: dict[str, Option], findings: Findings) -> list[Row]:
    compute_s = statistics.median(bench.compute.step_s)
    bench.report.extra["case"]["compute_alone_s"] = compute_s
    workload, cluster = Speed(compute_s / findings.workload.compute_s).of(findings.workload, findings.cluster)
    rows = []
    for name, runner in runners.items():
        if runner.way is None:
            continue
        option, seconds = options[name], sorted(runner.step_s)
        prediction, median_s = option.prediction, statistics.median(seconds)
        then = predict_option(workload, cluster, option.way, option.cap_mb).prediction
        # The prediction without the factors that the probe's check has found.
        unfitted = predict_option(findings.workload, findings.cluster, option.way, option.cap_mb).prediction
        figures = {
            "predicted_s": prediction.step_s,
            "ratio": prediction.step_s / median_s,
            "ratio_at_speed": then.step_s / median_s,
            "unfitted_ratio": unfitted.step_s / median_s,
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
    runners = make_runners(bench, arguments)

    def turns(rounds: range) -> None:
        for index in rounds:
            names = list(runners)
            first = index % len(names)
            for name in names[first:] + names[:first]:
                bench.turn(runners[name], arguments.steps, also_sync=False)
            bench.say(f"{bench.case}: round {index + 1} of {arguments.rounds}")

    # A machine's speed changes, so half of the steps run before the probe and half after it.
    turns(range(arguments.rounds // 2))
    bench.begin("the probe")
    findings = run_probe(bench, arguments)
    bench.say(report.text(findings))
    options = {name_of(option.way, option.cap_mb): option for option in findings.options}
    chosen, default = findings.recommendation.option, choices.recommend(findings.options, ACCEPT).option
    bench.report.extra["recommended"] = name_of(chosen.way, chosen.cap_mb)
    bench.report.extra["by_default"] = {
        "recommended": name_of(default.way, default.cap_mb),
        "among": [name for name, option in options.items() if option.wire in (OFF, *ACCEPT)],
    }
    document = report.as_json(findings)
    for sample in document["network"]["samples"]:
        sample["seconds"] = [round(value, 6) for value in sample["seconds"]]
    bench.report.extra["case"] = {
        "compute_s": findings.workload.compute_s,
        "reason": findings.recommendation.reason,
        "probe": document,
    }
    turns(range(arguments.rounds // 2, arguments.rounds))
    bench.report.rows = rows_of(bench, runners, options, findings)
    bench.report.write()
    for runner in runners.values():
        runner.close()
    groups.end_together()


if __name__ == "__main__":
    main()
