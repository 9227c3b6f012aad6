"""What others have published about clusters, beside what the model of ``fusedcomm plan`` says of the same.

``horovod``: the scaling efficiencies in Horovod's README: 90% for Inception V3 and ResNet-101 and 68% for VGG-16 on 512
GPUs (docs/benchmarks), 79% for VGG-16 on 128 (earlier README), on servers of four Pascal GPUs with 25 Gbit/s RoCE.

``bucket_size``: how a step's time depends on DDP's bucket size, in "PyTorch Distributed" (VLDB 2020, arXiv:2006.15704):
over NCCL ResNet-50 is fastest with 10 to 25 MB, and slower without buckets and with very large ones; BERT, which is
larger, is fastest with more. Its figures have no numbers that could be copied, so only the shape is compared.
"""

import dataclasses
from collections.abc import Sequence

from fusedcomm.tools.cost_model import Choice, Gradient, Workload, predict
from fusedcomm.tools.plan.architectures import architecture
from fusedcomm.tools.plan.paper import Hardware, Training

HOROVOD_CYCLE_S = 5e-3
HOROVOD_FUSION_NBYTES = 64 << 20
"""Horovod's defaults until 0.21: HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD."""

P100_BATCH = 64
P100_SAMPLES_PER_S = {"inception-v3": 142.0, "resnet50": 219.0, "resnet152": 91.8, "vgg16": 154.0}
"""TensorFlow's published benchmarks of May 2017: one P100, batch 64, synthetic data."""

V100_STEP_S = {"resnet50": 0.097}
"""PyTorch's benchmarks/distributed/ddp/README.md: one V100, batch 32, without DDP."""
BERT_STEP_S = 0.4
"""Assumed: no batch is published. A step of four times as long as ResNet-50's, for thirteen times its gradients."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    model: str
    ranks: int
    published: float
    """Efficiency: a GPU's throughput among `ranks`, by that of one GPU alone."""
    predicted: float


def resnet101_samples_per_s() -> float:
    """Not published; its time is between those of ResNet-50 and ResNet-152 as its multiply-adds are."""
    small, middle, large = (architecture(f"resnet{layers}").multiply_adds for layers in (50, 101, 152))
    fast, slow = 1 / P100_SAMPLES_PER_S["resnet50"], 1 / P100_SAMPLES_PER_S["resnet152"]
    return 1 / (fast + (slow - fast) * (middle - small) / (large - small))


def horovod_hardware(ranks: int) -> Hardware:
    """NCCL has trees since 2.4, of 2019."""
    return Hardware(
        ranks, ranks_per_host=4, nic_gbps=25, local_gbps=80, local_latency_us=5.7, tree=False, memory_gbytes_per_s=550
    )


def fused(workload: Workload) -> list[list[Gradient]]:
    """As Horovod fuses: what fits in its buffer, in order; sent when the last of it is there and half a cycle later."""
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
    """changes: of the hardware, to see what depends on it."""
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
        cluster = dataclasses.replace(horovod_hardware(ranks), **changes).cluster()
        prediction = predict(workload, Choice(None), cluster, fused(workload))
        found.append(Scaling(model, ranks, published, prediction.compute_s / prediction.step_s))
    return found


def horovod_assumptions() -> dict[str, str]:
    rates = ", ".join(f"{model} {rate:g}" for model, rate in P100_SAMPLES_PER_S.items())
    return {
        "compute": f"TensorFlow's published P100 figures, batch {P100_BATCH}, samples/s: {rates}; resnet101 "
        f"{resnet101_samples_per_s():.0f}, between them by multiply-adds; two thirds of a step are backward",
        "horovod": f"groups of at most {HOROVOD_FUSION_NBYTES >> 20} MiB, full since TensorFlow enqueues its backward "
        f"pass ahead of the GPU; each waits half a cycle of {HOROVOD_CYCLE_S * 1e3:g} ms (its defaults then)",
        **horovod_hardware(512).assumptions(),
        "calibrated on these figures": "nothing; slowdown is from another measurement, all else from the sources named",
    }


@dataclasses.dataclass(frozen=True)
class Curve:
    model: str
    ranks: int
    step_s_by_mib: dict[float, float]

    @property
    def best_mib(self) -> float:
        return min(self.step_s_by_mib, key=self.step_s_by_mib.get)


BUCKET_MIB = {
    "resnet50": (0, 1, 5, 10, 25, 50, 100),
    "bert-large": (0, 1, 5, 10, 25, 50, 100, 200, 400),
}


def bucket_hardware(ranks: int) -> Hardware:
    """That paper's: servers of eight V100 with NVLink and one NIC of 100 Gbit/s."""
    return Hardware(
        ranks, ranks_per_host=8, nic_gbps=100, local_gbps=480, local_latency_us=3.4, memory_gbytes_per_s=750
    )


def bucket_size(ranks: Sequence[int] = (16, 32)) -> list[Curve]:
    curves = []
    for model, step_s in (*V100_STEP_S.items(), ("bert-large", BERT_STEP_S)):
        workload = Training(architecture(model).parameters, step_s).workload()
        for count in ranks:
            cluster = bucket_hardware(count).cluster()
            steps = {mib: predict(workload, Choice(None, mib << 20), cluster).step_s for mib in BUCKET_MIB[model]}
            curves.append(Curve(model, count, steps))
    return curves


def bucket_assumptions() -> dict[str, str]:
    return {
        "compute": f"resnet50 {V100_STEP_S['resnet50'] * 1e3:g} ms a step (batch 32 on a V100, PyTorch's "
        f"benchmarks/distributed/ddp/README.md), bert-large {BERT_STEP_S * 1e3:g} ms (assumed); two thirds are "
        "backward",
        **bucket_hardware(32).assumptions(),
        "calibrated on these figures": "nothing; slowdown is fitted to how much slower 1 MB is than 25 in that README",
    }


def slowdown_fit(slowdown: float) -> list[tuple[str, int, float, float]]:
    """(model, ranks, by how much of a step 1 MB buckets were slower than 25 MB ones, the same predicted): what the
    default slowdown is fitted to. DGX-1 with V100 and four NICs of 100 Gbit/s."""
    measured = {
        "resnet50": (0.097, {2: 0.010, 4: 0.016, 8: 0.026, 16: 0.038}),
        "resnet101": (0.162, {2: 0.021, 4: 0.020, 8: 0.026, 16: 0.001}),
    }
    found = []
    for model, (step_s, slower) in measured.items():
        workload = Training(architecture(model).parameters, step_s).workload()
        for ranks, share in slower.items():
            per_host = min(ranks, 8)
            cluster = Hardware(
                ranks,
                per_host,
                nic_gbps=400,
                local_gbps=480,
                local_latency_us=3.4,
                memory_gbytes_per_s=750,
                slowdown=slowdown,
            ).cluster()
            large, small = (predict(workload, Choice(None, mib << 20), cluster).step_s for mib in (25, 1))
            found.append((model, ranks, share, small / large - 1))
    return found
