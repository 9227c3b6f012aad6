"""Loss scaling for a ``ShardedOptimizer``, whose sums are at their owners and not in ``p.grad``."""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState


class SumsScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that asks an optimizer with ``unscale_sums()`` to unscale, and to say on every rank
    what was found on any.

    Torch's own protocol does not suffice: an optimizer that is given ``grad_scale`` and ``found_inf`` cannot tell the
    scaler of an Inf on another rank, so the ranks' scales would differ from then on.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:  # noqa: ANN401
        """As torch's."""
        is_ready = self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        if is_ready and hasattr(optimizer, "unscale_sums"):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        unscale = getattr(optimizer, "unscale_sums", None)
        if unscale is not None:
            return unscale(inv_scale)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
