"""The parameters that an engine synchronizes: their names and their wires."""

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils.stateless import _functional_call

from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.patterns import by_tensor

_FIRST_BUCKET_MIB, _MIB = 1, 1 << 20


@dataclasses.dataclass(frozen=True)
class NamedParameter:
    """A parameter that is synchronized, with its name and its wire."""

    name: str
    tensor: torch.Tensor
    wire: int
    """Number of its wire; see csrc/engine/config.h."""
    other_names: tuple[str, ...] = ()
    """Further names of a tied parameter. Only patterns use them; everything else uses `name`."""


def named_parameters(named: Iterable[tuple[str, torch.Tensor]], config: Config) -> list[NamedParameter]:
    """Returns the parameters with the wires that `config` gives them.

    Parameters that require gradients come first. Frozen ones follow, because DDP may have taken them before they were
    frozen.

    Args:
        named: names and tensors; a tied parameter appears once under each of its names.

    Raises:
        ValueError: a pattern has no effect on parameters that require gradients (on any, if all are frozen), or two
            patterns disagree over a tied parameter.
    """
    named = sorted(named, key=lambda pair: not pair[1].requires_grad)
    config.check_patterns([(name, tensor) for name, tensor in named if tensor.requires_grad] or named)
    parameters = [NamedParameter(name, tensor, 0, tuple(others)) for (name, *others), tensor in by_tensor(named)]
    return numbered(parameters, config)


def numbered(parameters: Sequence[NamedParameter], config: Config) -> list[NamedParameter]:
    """Returns `parameters` with the wires that `config` gives them."""
    return [dataclasses.replace(p, wire=config.wire_number(p.name, p.tensor, p.other_names)) for p in parameters]


def trainable(parameters: Sequence[NamedParameter] | None) -> list[NamedParameter]:
    """Returns the parameters that require gradients now; an empty list for None."""
    return [p for p in parameters or [] if p.tensor.requires_grad]


def has_sparse_gradient(module: torch.nn.Module) -> bool:
    """Whether the gradient of the module's `weight` is sparse."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


def grad_dtypes(parameters: Sequence[NamedParameter] | None, reduces_rows: bool) -> list[torch.dtype]:
    """What an accelerator's kernels read and write; all dtypes if the parameters are not known.

    reduces_rows: whether sums are reduce-scatters, which may be fp32 whatever the rows are.
    """
    found = {p.tensor.dtype.to_real() for p in trainable(parameters)} & set(_C.GRAD_DTYPES)
    if not found:
        return list(_C.GRAD_DTYPES)
    return sorted(found | {torch.float32} if reduces_rows else found, key=str)


def device_of(named: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of the gradients, or of frozen parameters if all are frozen; cpu if there are no parameters."""
    return next((tensor.device for tensor in _with_gradients(named)), torch.device("cpu"))


def _with_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that require gradients, or all if none does, because any may be trained later."""
    return [tensor for _, tensor in named if tensor.requires_grad] or [tensor for _, tensor in named]


def synchronized_parameters(named: Sequence[tuple[str, torch.Tensor]], config: Config) -> list[NamedParameter]:
    """See :func:`named_parameters`.

    Raises:
        RuntimeError: the gradients are on several devices.
    """
    devices = sorted({str(tensor.device) for tensor in _with_gradients(named)})
    if len(devices) > 1:
        raise RuntimeError(f"fusedcomm: the gradients are on several devices, {devices}: move the model to one")
    return named_parameters(named, config)


def strides_to_agree(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, list[int]]:
    """The strides of parameters that are not contiguous: gradients are sent in the order of memory, so all ranks must
    have the same."""
    return {name: list(tensor.stride()) for name, tensor in named if not tensor.is_contiguous()}


def bucket_caps(mib: float) -> list[int]:
    """Bytes at which the first bucket and the others are complete, if a bucket is to have `mib` MiB. As in DDP, the
    first has 1 MiB at most, so that sending begins early."""
    return [int(min(_FIRST_BUCKET_MIB, mib) * _MIB), int(mib * _MIB)]


def _is_in_functional_call() -> bool:
    """Whether torch has put other tensors in the place of a module's parameters until a call returns."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class ParameterWatch:
    """Notices that a module has other parameters than when this object was made: ``load_state_dict(assign=True)``, and
    whoever assigns a parameter or a module, puts them in the place of those that are synchronized.

    Cheap enough for every forward pass: it compares the entries of the modules' tables, about 50 ns each.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        # Kept, so that no other tensor gets the address of one.
        self._known = {id(parameter): parameter for parameter in module.parameters()}
        self._look_at(module)

    def unknown(self) -> dict[str, torch.Tensor]:
        """The new parameters that require gradients, by all their names. None of those that are there for one call, as
        in ``torch.func.functional_call``, whose gradients are the caller's."""
        module = self._module()
        if module is None or self._ids() == self._seen:
            return {}
        named = module.named_parameters(remove_duplicate=False)
        found = {name: parameter for name, parameter in named if id(parameter) not in self._known}
        if not found:
            self._look_at(module)  # modules have other places, the parameters are the same
        if found and _is_in_functional_call():
            return {}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def _look_at(self, module: torch.nn.Module) -> None:
        self._inside = [weakref.ref(each) for each in module.modules()]
        self._seen = self._ids()

    def _ids(self) -> list[int] | None:
        """The ids of all parameters and modules, as they are now; None if a module is gone."""
        held: list[object] = []
        for reference in self._inside:
            inside = reference()
            if inside is None:
                return None
            if isinstance(inside._parameters, dict):  # not so in TorchScript, which keeps its own tables
                held += inside._parameters.values()
                held += inside._modules.values()
        return list(map(id, held))
