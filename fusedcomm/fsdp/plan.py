"""The plan of an FSDP2 model: its modules' sums, and what hosts send to each other."""

import dataclasses

from fusedcomm.fsdp.grid import Traffic
from fusedcomm.session.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpPlan(Plan):
    """How gradients are sent. A row is a module: `grad_nbytes` in fp32, of all ranks' slices with their padding;
    `sent_nbytes` in its reduce-scatter, 0 without one; `wire` is empty where torch reduces.

    `num_shards`: ranks of a reduce-scatter, in `wire`; `num_replicas`: ranks of the all-reduce that follows, in
    `wire_of_replicas`; 1 for neither. `traffic`: of the host that sends most; None with `off`. `params`: the wire in
    which parameters are gathered. `gathered_nbytes`: that this rank sends in the all-gathers of a step,
    `exact_gathered_nbytes` if all were torch's own; `summed_nbytes`: in all-reduces between replicas, 0 where torch
    sums. `kept_nbytes`: of codes that this rank keeps from forward to backward passes. `levels`: the hosts, where
    reduce-scatters add within them first; empty on one level, of which `one_level_reason` says why, if several hosts
    have several ranks. `off`: whether torch reduces, as it does without fusedcomm; `wire` is then "off", too. `others`:
    plans of modules on further meshes."""

    wire: str
    wire_of_replicas: str
    num_shards: int
    num_replicas: int
    codec: str
    scratch_nbytes: int
    traffic: Traffic | None
    params: str = "fp32"
    gathered_nbytes: int = 0
    exact_gathered_nbytes: int = 0
    kept_nbytes: int = 0
    summed_nbytes: int = 0
    levels: str = ""
    one_level_reason: str = ""
    off: bool = False
    others: tuple["FsdpPlan", ...] = ()

    _of = "module"

    @property
    def headline(self) -> str:
        sums = []
        if self.num_shards > 1:
            ranks = self.levels or f"{self.num_shards} ranks"
            sums.append(f"reduce-scatters in {self.wire} over {ranks}")
        if self.num_replicas > 1:
            sums.append(f"all-reduces in {self.wire_of_replicas} over {self.num_replicas} replicas")
        if self.off:
            ranks = self.num_shards * self.num_replicas
            how = "one rank, which sends no gradients" if ranks == 1 else f"torch's own sums over {ranks} ranks"
            return f"FSDP2: off, {how}"
        return f"FSDP2: {' and '.join(sums)}, codec {self.codec}, buffers {self.scratch_nbytes / 2**20:.1f} MiB"

    def _ends(self) -> list[str]:
        lines = []
        exact = self.grad_nbytes * (self.num_shards - 1) // self.num_shards
        if exact and not self.off:
            sent = self.sent_nbytes
            lines.append(
                f"  reduce-scatters: a rank sends {sent / 2**20:.2f} MiB in a step, {sent / exact:.3f} of fp32"
            )
        if self.one_level_reason:
            lines.append(f"  reduce-scatters have one level, not two: {self.one_level_reason}")
        if self.params != "fp32" and self.exact_gathered_nbytes:
            share = self.gathered_nbytes / self.exact_gathered_nbytes
            lines.append(
                f"  all-gathers of parameters in {self.params}: a rank sends {self.gathered_nbytes / 2**20:.2f} MiB in "
                f"a step, {share:.3f} of torch's"
            )
        if self.kept_nbytes:
            lines.append(
                f"  each rank keeps {self.kept_nbytes / 2**20:.2f} MiB of codes from other hosts, so that backward "
                "passes gather parameters within hosts"
            )
        if self.traffic is not None:
            gradients, parameters = self.traffic.gradients_nbytes / 2**20, self.traffic.parameters_nbytes / 2**20
            lines.append(
                f"  to other hosts a host sends {gradients:.2f} MiB of gradients and {parameters:.2f} MiB of "
                "parameters in a step"
            )
        return [*lines, *map(str, self.others)]
