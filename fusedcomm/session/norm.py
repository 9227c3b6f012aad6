"""Norms and clipping of gradients, from squares that unpack has added up while it wrote them."""

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fusedcomm.native import _C
from fusedcomm.session.handle import CommHandle

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grads_with_norm_."""

_other_norms: set[float] = set()
"""The norms other than 2 that a warning has named."""


class GradientNorms(CommHandle):
    """A handle with ``grad_norm()`` and ``clip_grad_norm_()``."""

    _shows: tuple[str, ...] = ("clip_grad_norm_", "grad_norm")

    def grad_norm(
        self,
        norm_type: float = 2.0,
        *,
        also: Iterable[torch.Tensor] = (),
        tensor_parallel_group: dist.ProcessGroup | None = None,
        replicated: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The norm of all gradients together, the same on every rank. Call it after a backward pass.

        From the second call on no gradient is read for it: unpack adds up Σg², in fp64, while it writes the means. A
        bucket is read again if one of its gradients has changed since the backward pass. (A change through ``.data``
        is not seen: change gradients in ``torch.no_grad()``.) On cuda, and where DDP's own all-reduce runs, the
        gradients are read.

        Args:
            norm_type: 2, or any other norm, ``math.inf`` too, for which the gradients are read.
            also: further parameters, which something else synchronizes or nothing does. Those that are synchronized
                here, and those without a gradient, count once or not at all.
            tensor_parallel_group: the ranks that hold the other shards of these parameters. The squares of their shards
                are added, so every rank of the group must call this.
            replicated: parameters that every rank of that group holds whole. They count once.

        Returns:
            A tensor without dimensions on the gradients' device: float64 if a gradient is, otherwise float32.

        Raises:
            RuntimeError: no parameter has a gradient, as before any backward pass.
            ValueError: norm_type is not positive, or `replicated` was given without a group.
        """
        return _norm(self._measured(also), norm_type, tensor_parallel_group, list(replicated))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        also: Iterable[torch.Tensor] = (),
        tensor_parallel_group: dist.ProcessGroup | None = None,
        replicated: Iterable[torch.Tensor] = (),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Scales the gradients down to `max_norm` if their norm is greater, and returns the norm before.

        In place of ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``. The norm is :meth:`grad_norm`'s.
        If it is below `max_norm`, the gradients are not touched.

        Args:
            error_if_nonfinite: whether a NaN or infinite norm is an error. If not, it makes the gradients NaN or 0, as
                in torch.
            optimizer: if it takes ``grad_scale``, as torch's optimizers with ``fused=True`` do, it gets the factor, and
                divides while it reads the gradients: nothing reads or writes them for clipping, and they stay
                unclipped. Other optimizers get clipped gradients.

        Other arguments, and what is raised, are as in :meth:`grad_norm`. Also:

        Raises:
            RuntimeError: error_if_nonfinite, and the norm is not finite.
            ValueError: `optimizer` has other parameters with gradients than those whose norm this is.
        """
        measured = self._measured(also)
        norm = _norm(measured, norm_type, tensor_parallel_group, list(replicated))
        if error_if_nonfinite:
            refuse_nonfinite(norm)
        factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
        hand_over = None
        if optimizer is not None:
            _refuse_others(optimizer, measured.parameters)
            if takes_grad_scale(optimizer):
                hand_over = _HandOver.of(optimizer)
                hand_over.forget()
        if norm.device.type == "cpu" and factor.item() == 1:
            return norm
        if hand_over is not None:
            hand_over.give(factor.float().reciprocal(), measured.synchronizer)
        else:
            _scale([p.grad for p in measured.parameters if p.grad is not None], factor)
        return norm

    def parameters_now(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients are synchronized, and perhaps frozen ones; for fusedcomm itself."""
        raise NotImplementedError

    def synchronizer_now(self) -> "_C.Synchronizer | None":
        """What has synchronized the gradients of the last pass; None for torch's own sums. For fusedcomm itself."""
        self.refuse_detached("no gradients are synchronized")
        return self.session.synchronizer if self.runs.uses_engine else None

    def next_synchronizer(self) -> "_C.Synchronizer | None":
        """What is asked for the next pass. If a search gives that pass to another one, it passes the requests on."""
        self.refuse_detached("no gradients are synchronized")
        return self.session.synchronizer if self.session.uses_engine else None

    def _unpack_writes_all(self) -> bool:
        """Whether unpack writes the gradients of all parameters of a bucket."""
        return True

    def want_squares(self) -> None:
        """From the next pass on Σg² is known, as far as unpack writes the gradients. For fusedcomm itself."""
        synchronizer = self.next_synchronizer()
        if synchronizer is not None:
            synchronizer.epilogue.want_squares(in_unpack=self._unpack_writes_all())

    def _measured(self, also: Iterable[torch.Tensor]) -> "Measured":
        measured = Measured(self.synchronizer_now(), [*self.parameters_now(), *also])
        self.want_squares()
        if all(p.grad is None for p in measured.parameters):
            raise RuntimeError(
                f"fusedcomm: none of the {len(measured.parameters)} parameters has a gradient, so there is no norm: "
                "call this between backward() and the zero_grad() after it"
            )
        return measured


def refuse_nonfinite(norm: torch.Tensor) -> None:
    """Raises RuntimeError if the norm is NaN or infinite."""
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"fusedcomm: the norm of the gradients is {norm.item()}, so they cannot be clipped. To clip anyway: "
            "error_if_nonfinite=False"
        )


class Measured:
    """The parameters of a norm, and what synchronizes most of them."""

    def __init__(self, synchronizer: "_C.Synchronizer | None", parameters: list[torch.Tensor]) -> None:
        self.synchronizer, self.parameters = synchronizer, list({id(p): p for p in parameters}.values())

    def squares(self) -> torch.Tensor:
        """Σg², a float64 tensor without dimensions."""
        total, others = 0.0, [p for p in self.parameters if p.grad is not None]
        device = others[0].grad.device
        if self.synchronizer is not None:
            total, others = self.synchronizer.epilogue.squares(self.parameters)
        return torch.tensor(total, dtype=torch.float64, device=device) + power_sum(others, 2.0, device)


def _norm(
    measured: Measured, norm_type: float, group: dist.ProcessGroup | None, replicated: list[torch.Tensor]
) -> torch.Tensor:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not possible: use a number greater than 0, or math.inf")
    if replicated and group is None:
        raise ValueError("fusedcomm: `replicated` names what the ranks of tensor_parallel_group share: give the group")
    gradients = [p.grad for p in measured.parameters if p.grad is not None]
    device = gradients[0].device
    if norm_type == 2:
        total = measured.squares()
    else:
        if norm_type not in _other_norms:
            _other_norms.add(norm_type)
            warnings.warn(
                f"fusedcomm adds up squares while it writes gradients. The norm of type {norm_type} reads them again.",
                stacklevel=4,
            )
        total = power_sum(measured.parameters, norm_type, device)
    if group is not None:
        whole = power_sum([p for p in replicated if p.grad is not None], norm_type, device)
        if math.isinf(norm_type):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        else:
            # Every rank has the same `whole`, so it is added once.
            total = total - whole
            dist.all_reduce(total, group=group)
            total = total + whole
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type) if norm_type != 2 else total.sqrt()
    return norm.to(torch.float64 if any(_real_dtype(g) == torch.float64 for g in gradients) else torch.float32)


def power_sum(parameters: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Σ|g|^norm_type of their gradients, or the greatest |g| for infinity; a float64 tensor without dimensions."""
    dense, norms = [], []
    for gradient in (p.grad.detach() for p in parameters if p.grad is not None):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel() == 0:
            continue
        if values.is_complex():
            norms.append(torch.linalg.vector_norm(values, norm_type, dtype=torch.complex128).double())
        else:
            dense.append(values)
    if dense:
        norms += torch._foreach_norm(dense, norm_type, dtype=torch.float64)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _real_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        kinds.setdefault((values.device, _real_dtype(values)), []).append(values)
    with torch.no_grad():
        for (device, dtype), values in kinds.items():
            torch._foreach_mul_(values, factor.to(device, dtype))


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides gradients by its ``grad_scale`` while it steps, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _refuse_others(optimizer: torch.optim.Optimizer, measured: list[torch.Tensor]) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    known = {id(p) for p in measured}
    strange = [tuple(p.shape) for p in held if id(p) not in known]
    if strange:
        raise ValueError(
            f"fusedcomm: the optimizer also holds {len(strange)} parameters that are not in this norm, the first of "
            f"shape {strange[0]}: give them as also=, or clip without optimizer="
        )
    holds = {id(p) for p in held}
    missing = [tuple(p.shape) for p in measured if p.grad is not None and id(p) not in holds]
    if missing:
        raise ValueError(
            f"fusedcomm: {len(missing)} parameters of this norm are not in the optimizer, the first of shape "
            f"{missing[0]}, and would not be clipped: clip without optimizer="
        )


class _HandOver:
    """Gives an optimizer a divisor of gradients for its next step. Each optimizer has at most one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._divisor: torch.Tensor | None = None
        self._synchronizer: _C.Synchronizer | None = None
        self._step: int | None = None
        # The hooks stay: torch goes through its hooks while they run, and raises if one is removed meanwhile.
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> "_HandOver":
        if not hasattr(optimizer, "_fusedcomm_hand_over"):
            optimizer._fusedcomm_hand_over = _HandOver(optimizer)
        return optimizer._fusedcomm_hand_over

    def forget(self) -> None:
        self._divisor = self._synchronizer = None

    def give(self, divisor: torch.Tensor, synchronizer: "_C.Synchronizer | None") -> None:
        """`synchronizer` tells if a backward pass comes before the step, which is an error."""
        self._divisor, self._synchronizer = divisor, synchronizer
        self._step = None if synchronizer is None else synchronizer.step

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._divisor is None:
            return
        if self._synchronizer is not None and self._synchronizer.step != self._step:
            self.forget()
            raise RuntimeError(
                "fusedcomm: a backward pass came between clip_grad_norm_(optimizer=…) and optimizer.step(), so the "
                "factor does not belong to these gradients: clip after the last backward pass of a step"
            )
        before = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = self._divisor if before is None else before * self._divisor

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._divisor is None:
            return
        self.forget()
        # A GradScaler has set found_inf, and removes both itself.
        if not hasattr(optimizer, "found_inf"):
            del optimizer.grad_scale
