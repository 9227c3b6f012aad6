"""Published figures about clusters, beside the predictions of the model of ``fusedcomm plan`` for the same clusters.

``horovod``: the scaling efficiencies in Horovod's README, on servers with four Pascal GPUs and 25 Gbit/s RoCE. With 512
GPUs: 90% for Inception V3 and ResNet-101, 68% for VGG-16 (docs/benchmarks). With 128: 79% for VGG-16 (earlier README).

``bucket_size``: how a step's time depends on DDP's bucket size, in "PyTorch Distributed" (VLDB 2020, arXiv:2006.15704).
Over NCCL, ResNet-50 is fastest with buckets of 10 to 25 MB, and slower without buckets or with very large ones. BERT,
which is larger, is fastest with larger buckets. The figures there show no numbers, so only the shapes are compared.
"""

import dataclasses
from collections.abc import Sequence

from fusedcomm.tools.cost_model import Choice, Gradient, Workload, predict
from fusedcomm.tools.plan.architectures import architecture
from fusedcomm.tools.plan.costs import cluster_of
from fusedcomm.tools.plan.hardware import GpuHosts
from fusedcomm.tools.plan.paper import Training

# Horovod's default HOROVOD_CYCLE_TIME until 0.21, in seconds.
HOROVOD_CYCLE_S = 5e-3
HOROVOD_FUSION_NBYTES = 64 << 20
"""Horovod's default HOROVOD_FUSION_THRESHOLD until 0.21, in bytes."""

P100_BATCH = 64
P100_SAMPLES_PER_S = {"inception-v3": 142.0, "resnet50": 219.0, "resnet152": 91.8, "vgg16": 154.0}
"""Samples per second, from TensorFlow's published benchmarks of May 2017: one P100, batch 64, synthetic data."""

V100_STEP_S = {"resnet50": 0.097}
"""Seconds of a step, from PyTorch's benchmarks/distributed/ddp/README.md: one V100, batch 32, without DDP."""
BERT_STEP_S = 0.4
"""Seconds of a step. Assumed, as no batch size is published: four times ResNet-50's, for 13 times its gradients."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A published scaling efficiency and the predicted one."""

    model: str
    ranks: int
    published: float
    """Throughput of each of `ranks` GPUs, divided by the throughput of one GPU alone."""
    predicted: float


def resnet101_samples_per_s() -> float:
    """Not published: the time is interpolated between those of ResNet-50 and ResNet-152 by multiply-adds."""
    small, middle, large = (architecture(f"resnet{layers}").multiply_adds for layers in (50, 101, 152))
    fast, slow = 1 / P100_SAMPLES_PER_S["resnet50"], 1 / P100_SAMPLES_PER_S["resnet152"]
    return 1 / (fast + (slow - fast) * (middle - small) / (large - small))


def horovod_hardware(ranks: int) -> GpuHosts:
    """The hardware of Horovod's figures. There is no tree: NCCL has had trees only since 2.4, of 2019."""
    return GpuHosts(
        ranks, ranks_per_host=4, nic_gbps=25, local_gbps=80, local_latency_us=5.7, tree=False, memory_gbytes_per_s=550
    )


def fused(workload: Workload) -> list[list[Gradient]]:
    """Groups gradients as Horovod does: in order, as many as fit in its buffer. A group is ready half a cycle after its
    last gradient."""
    groups: list[list[Gradient]] = [[]]
    nbytes = 0
    for gradient in workload.gradients:
        if groups[-1] and nbytes + 4 * gradient.numel > HOROVOD_FUSION_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(gradient)
        nbytes += 4 * gradient.numel
    for group in groups:
        group[-1] = dataclasses.replace(group[-1], ready_s=group[-1].ready_s + HOROVOD_CYCLE_S / 2)
    return groups


def horovod(**changes: object) -> list[Scaling]:
    """The published and the predicted efficiencies. changes: fields of the hardware to replace, to see their effect."""
    samples_per_s = {**P100_SAMPLES_PER_S, "resnet101": resnet101_samples_per_s()}
    found = []
    for model, ranks, published in (
        ("inception-v3", 512, 0.90),
        ("resnet101", 512, 0.90),
        ("vgg16", 512, 0.68),
        ("vgg16", 128, 0.79),
    ):
        training = Training(architecture(model).parameters, P100_BATCH / samples_per_s[model])
        workload = training.workload()
        cluster = cluster_of(dataclasses.replace(horovod_hardware(ranks), **changes))
        prediction = predict(workload, Choice(None), cluster, fused(workload))
        found.append(Scaling(model, ranks, published, prediction.compute_s / prediction.step_s))
    return found


def horovod_assumptions() -> dict[str, str]:
    rates = ", ".join(f"{model} {rate:g}" for model, rate in P100_SAMPLES_PER_S.items())
    return {
        "compute": f"TensorFlow's published P100 figures, batch {P100_BATCH}, samples/s: {rates}; resnet101 "
        f"{resnet101_samples_per_s():.0f}, interpolated by multiply-adds; two thirds of a step are the backward pass",
        "horovod": f"groups of at most {HOROVOD_FUSION_NBYTES >> 20} MiB, full because TensorFlow enqueues backward "
        f"passes ahead of the GPU; each waits half a cycle of {HOROVOD_CYCLE_S * 1e3:g} ms (defaults at the time)",
        **horovod_hardware(512).assumptions(),
        "calibrated on these figures": "nothing; slowdown is from another measurement, the rest from the named sources",
    }


@dataclasses.dataclass(frozen=True)
class Curve:
    """The predicted step by DDP's bucket size in MiB."""

    model: str
    ranks: int
    step_s_by_mib: dict[float, float]

    @property
    def best_mib(self) -> float:
        return min(self.step_s_by_mib, key=self.step_s_by_mib.get)


# DDP's bucket sizes in MiB. With 0 every gradient is a bucket of its own.
BUCKET_MIB = {
    "resnet50": (0, 1, 5, 10, 25, 50, 100),
    "bert-large": (0, 1, 5, 10, 25, 50, 100, 200, 400),
}


def bucket_hardware(ranks: int) -> GpuHosts:
    """The paper's hardware: servers with eight V100, NVLink and one NIC of 100 Gbit/s."""
    return GpuHosts(
        ranks, ranks_per_host=8, nic_gbps=100, local_gbps=480, local_latency_us=3.4, memory_gbytes_per_s=750
    )


def bucket_size(ranks: Sequence[int] = (16, 32)) -> list[Curve]:
    """A curve for each model and each number of ranks."""
    curves = []
    for model, step_s in (*V100_STEP_S.items(), ("bert-large", BERT_STEP_S)):
        workload = Training(architecture(model).parameters, step_s).workload()
        for count in ranks:
            cluster = cluster_of(bucket_hardware(count))
            steps = {mib: predict(workload, Choice(None, mib << 20), cluster).step_s for mib in BUCKET_MIB[model]}
            curves.append(Curve(model, count, steps))
    return curves


def bucket_assumptions() -> dict[str, str]:
    return {
        "compute": f"resnet50 {V100_STEP_S['resnet50'] * 1e3:g} ms a step (batch 32 on a V100, PyTorch's "
        f"benchmarks/distributed/ddp/README.md), bert-large {BERT_STEP_S * 1e3:g} ms (assumed); two thirds are "
        "the backward pass",
        **bucket_hardware(32).assumptions(),
        "calibrated on these figures": "nothing; slowdown is fitted to that README: 1 MB buckets against 25 MB",
    }


def slowdown_fit(slowdown: float) -> list[tuple[str, int, float, float]]:
    """The measurements to which the default slowdown is fitted, on DGX-1 with V100 and four NICs of 100 Gbit/s.

    Returns:
        (model, ranks, share by which a step with buckets of 1 MB was slower than with 25 MB, the predicted share)
    """
    measured = {
        "resnet50": (0.097, {2: 0.010, 4: 0.016, 8: 0.026, 16: 0.038}),
        "resnet101": (0.162, {2: 0.021, 4: 0.020, 8: 0.026, 16: 0.001}),
    }
    found = []
    for model, (step_s, slower) in measured.items():
        workload = Training(architecture(model).parameters, step_s).workload()
        for ranks, share in slower.items():
            per_host = min(ranks, 8)
            cluster = cluster_of(
                GpuHosts(
                    ranks,
                    per_host,
                    nic_gbps=400,
                    local_gbps=480,
                    local_latency_us=3.4,
                    memory_gbytes_per_s=750,
                    slowdown=slowdown,
                )
            )
            large, small = (predict(workload, Choice(None, mib << 20), cluster).step_s for mib in (25, 1))
            found.append((model, ranks, share, small / large - 1))
    return found
