"""The ranks of the probe. They act at the same time, and agree on what they measured."""

import json

import torch
import torch.distributed as dist

from fusedcomm.ranks.agreement import difference
from fusedcomm.tools.errors import ProbeError


class Team:
    """The ranks of a process group.

    Args:
        device: the gradients' device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = group.rank(), group.size()

    def barrier(self) -> None:
        """Returns when all ranks have called it and this rank's accelerator is idle."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=self.group)
        self.settle()

    def settle(self) -> None:
        """Waits for everything that was enqueued on an accelerator."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, numbers: list[float]) -> list[float]:
        """The largest of all ranks, for each number. A collective call."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values.tolist()

    def gather(self, value: object) -> list:
        """The values (JSON-serializable) of all ranks, in rank order. A collective call.

        It does what ``dist.all_gather_object`` does, which needs numpy.
        """
        own = json.dumps(value).encode()
        (nbytes,) = self.slowest([len(own)])
        padded = torch.zeros(int(nbytes), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        padded = padded.to(self.device)
        everybodys = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everybodys, padded, group=self.group)
        return [json.loads(bytes(theirs.tolist()).rstrip(b"\0")) for theirs in everybodys]

    def agree(self, record: object, advice: str) -> None:
        """Raises ProbeError, with the advice, on every rank if their records (JSON-serializable) are not equal. A
        collective call."""
        found = difference({f"rank {rank}": theirs for rank, theirs in enumerate(self.gather(record))})
        if found:
            raise ProbeError(f"{found}: {advice}")

    def agree_on_errors(self, error: str) -> None:
        """Raises ProbeError on every rank if `error` is not empty on one of them. A collective call."""
        errors = [(rank, text) for rank, text in enumerate(self.gather(error)) if text]
        if errors:
            rank, text = errors[0]
            raise ProbeError(text if len(errors) == self.world_size else f"on rank {rank}: {text}")
