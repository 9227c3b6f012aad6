"""Whether gradients were changed between a backward pass and step()."""

from collections.abc import Sequence

import torch

from fusedcomm.devices.late import LateAnswers
from fusedcomm.optimizer.parts import Target
from fusedcomm.session.checksums import quick


class SeenGradients:
    """The gradients of a pass: their ids and versions, and checksums, because a write through .data moves no
    version."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._seen: dict[int, tuple[tuple[int, int], torch.Tensor]] = {}
        self._written = LateAnswers()

    def see(self, target: int) -> None:
        """Notes the present gradient of a target."""
        self._seen[target] = self._now(target)

    def changed(self) -> str:
        """The name of a parameter with another gradient than it had; empty if there is none. On an accelerator a write
        through .data is found in the next pass."""
        now = {target: self._now(target) for target in self._seen}
        changed = [target for target, (seen, _) in self._seen.items() if seen != now[target][0]]
        if not changed and now:
            both = [torch.stack([bits for _, bits in each.values()]) for each in (self._seen, now)]
            changed = self._written.where(both[0] != both[1], list(now))
        return self._targets[changed[0]].name if changed else ""

    def forget(self) -> None:
        """Ends the pass."""
        self._seen.clear()

    def _now(self, target: int) -> tuple[tuple[int, int], torch.Tensor]:
        tensor = self._targets[target].tensor
        if tensor.grad is None:
            return (0, 0), torch.zeros((), dtype=torch.int64, device=tensor.device)
        return (id(tensor.grad), tensor.grad._version), quick(tensor.grad)
