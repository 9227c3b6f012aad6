"""``fusedcomm.GradScaler``: torch's loss scaling, with unscaling and the check for Inf and NaN done by unpack."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch.amp.grad_scaler import OptState

from fusedcomm.native import _C
from fusedcomm.session.norm import GradientNorms


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose gradients come back from ``backward()`` unscaled.

    ::

        scaler = fusedcomm.GradScaler(comm, "cuda")
        ...
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # reads no gradient
        comm.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    The loop, the scale, the skipped steps and the gradients are those of torch's: unpack multiplies each mean by the
    inverse scale and rounds it as torch would, and Σg² of what it writes is finite if and only if all gradients are.
    (On cuda the inverse is part of unpack's factor, which gives the same bits for a scale that is a power of two.)

    Every synchronized backward pass needs a ``scale()`` of its own. Of several passes in a step call all but the last
    within ``no_sync()``.

    Args:
        comms: what :func:`fusedcomm.attach` returned for a DDP module, a :class:`fusedcomm.GradReducer`, a
            :class:`fusedcomm.DataParallel`, or several of them. For an FSDP2 model use ``torch.amp.GradScaler``.

    Other arguments are torch's. ``scale()`` raises RuntimeError if the gradients of the pass before are still there,
    unscaled, and no step has used them. ``backward()`` raises RuntimeError if it would add scaled gradients to them.
    """

    def __init__(
        self,
        comms: GradientNorms | torch.nn.Module | Sequence[GradientNorms | torch.nn.Module],
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        comms = list(comms) if isinstance(comms, Sequence) else [comms]
        self._comms = [_unscaler(comm) for comm in comms]
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._is_used = True  # whether a step has used the gradients of the last pass
        self._on_host: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def scale(self, outputs):  # noqa: ANN001, ANN201  (as in torch)
        """As torch's, and prepares the next synchronized pass to unscale. Raises RuntimeError as the class says."""
        scaled = super().scale(outputs)
        if not self._enabled:
            return scaled
        inverse = self._inverse()
        for comm in self._comms:
            comm.want_squares()
        for synchronizer in self._synchronizers():
            if synchronizer.epilogue.unscaled != 1 and not self._is_used and synchronizer.epilogue.has_unchanged:
                raise RuntimeError(
                    "fusedcomm: the gradients of the backward pass before are unscaled already, and no step has used "
                    "them, so those of this loss cannot be added: call backward() within no_sync() for all losses of a "
                    "step but the last, or zero_grad() before a new step"
                )
            synchronizer.epilogue.take_unscaled()
        for synchronizer in self._next_synchronizers():
            synchronizer.epilogue.require_unscale(True)
            synchronizer.epilogue.set_unscale(inverse)
        self._is_used = False
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> float | None:
        """As torch's. Gradients that unpack has unscaled are not unscaled again."""
        is_ready = self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        is_owners = hasattr(optimizer, "unscale_sums")
        if is_ready and (is_owners or any(each.epilogue.unscaled != 1 for each in self._synchronizers())):
            self.unscale_(optimizer)  # a fused optimizer would unscale once more
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's, and begins a new step."""
        super().update(new_scale)
        if not self._enabled:
            return
        for synchronizer in self._synchronizers():
            synchronizer.epilogue.take_unscaled()
        self._is_used = True
        if self._scale is not None and self._scale.device.type == "cuda":
            # Copied now, so that scale() need not wait for what is enqueued after this.
            copy = torch.empty((), dtype=torch.float32, pin_memory=True).copy_(
                self._scale.reshape(()), non_blocking=True
            )
            event = torch.cuda.Event()
            event.record()
            self._on_host = copy, event

    def release(self) -> None:
        """Ends the unscaling by unpack: backward passes without ``scale()`` are possible again."""
        for synchronizer in self._next_synchronizers():
            synchronizer.epilogue.require_unscale(False)

    def _synchronizers(self) -> "list[_C.Synchronizer]":
        return [found for comm in self._comms if (found := comm.synchronizer_now()) is not None]

    def _next_synchronizers(self) -> "list[_C.Synchronizer]":
        return [found for comm in self._comms if (found := comm.next_synchronizer()) is not None]

    def _inverse(self) -> float:
        """1 / scale as torch computes it: in fp64, rounded to fp32."""
        scale = self._scale
        if self._on_host is not None:
            scale, event = self._on_host
            event.synchronize()
        return scale.double().reciprocal().float().item()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        unscale = getattr(optimizer, "unscale_sums", None)
        if unscale is not None:  # a ShardedOptimizer, whose gradients are no means
            self._is_used = True
            return unscale(inv_scale)
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        scaled, finite = {id(p): p for p in mine}, True
        unread: list[torch.Tensor] = []
        for comm in self._comms:
            synchronizer = comm.synchronizer_now()
            if synchronizer is None or synchronizer.epilogue.unscaled == 1:
                continue
            self._is_used = True
            unscaled = [p for p in synchronizer.epilogue.parameters() if scaled.pop(id(p), None) is not None]
            if not allow_fp16 and any(p.grad is not None and p.grad.dtype == torch.float16 for p in unscaled):
                raise ValueError("Attempting to unscale FP16 gradients.")
            # A bucket counts only if all its parameters are in the optimizer.
            total, others = synchronizer.epilogue.squares(unscaled)
            finite = finite and total - total == 0
            unread += others
        found: dict[torch.device, torch.Tensor] = {}
        one = torch.ones_like(inv_scale)
        for parameters, factor in ((list(scaled.values()), inv_scale), (unread, one)):
            # These flags are copies of found_inf, one for each device, even for its own.
            flags = super()._unscale_grads_(_only(parameters), factor, found_inf, allow_fp16)
            for device, flag in flags.items():
                found[device] = torch.maximum(found.get(device, flag), flag)
        if not finite:
            found_inf.fill_(1.0)
        device = found_inf.device
        found[device] = torch.maximum(found.get(device, found_inf), found_inf)
        return found


def _unscaler(comm: object) -> GradientNorms:
    """What unscales gradients: `comm`, or that of a :class:`fusedcomm.DataParallel`. Raises TypeError."""
    found = getattr(comm, "comm", comm)
    if isinstance(found, GradientNorms):
        return found
    raise TypeError(
        "fusedcomm.GradScaler takes the handle of fusedcomm.attach(ddp), a fusedcomm.GradReducer or a "
        f"fusedcomm.DataParallel, not {type(comm).__name__}. For an FSDP2 model use torch.amp.GradScaler, which reads "
        "only this rank's shards and tells the other ranks of an Inf; for a model in DistributedDataParallel pass what "
        "fusedcomm.attach(ddp) returns"
    )


def _only(parameters: list[torch.Tensor]) -> SimpleNamespace:
    """What _unscale_grads_ reads of an optimizer with these parameters."""
    return SimpleNamespace(param_groups=[{"params": parameters}])
