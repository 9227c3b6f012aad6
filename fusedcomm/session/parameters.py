"""The parameters that an engine synchronizes: their names and their wires."""

import dataclasses
import operator
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch

from fusedcomm.config import Config
from fusedcomm.patterns import by_tensor


@dataclasses.dataclass(frozen=True)
class NamedParameter:
    name: str
    tensor: torch.Tensor
    wire: int
    """Number of its wire; see csrc/engine/config.h."""
    other_names: tuple[str, ...] = ()
    """Further names of a tied parameter. Only patterns use them; everything else uses `name`."""


def named_parameters(named: Iterable[tuple[str, torch.Tensor]], configs: Sequence[Config]) -> list[NamedParameter]:
    """Returns the parameters with the wires that the first of `configs` gives them.

    Parameters that require gradients come first. Frozen ones follow, because DDP may have taken them before they were
    frozen.

    Args:
        named: names and tensors; a tied parameter appears once under each of its names.

    Raises:
        ValueError: under every one of `configs`, a pattern has no effect on parameters that require gradients (on any,
            if all are frozen), or two patterns disagree over a tied parameter.
    """
    named = sorted(named, key=lambda pair: not pair[1].requires_grad)
    checked = [(name, tensor) for name, tensor in named if tensor.requires_grad] or named
    errors = []
    for each in configs:
        try:
            each.check_patterns(checked)
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(configs):
        raise errors[0]
    parameters = [NamedParameter(name, tensor, 0, tuple(others)) for (name, *others), tensor in by_tensor(named)]
    return numbered(parameters, configs[0])


def numbered(parameters: Sequence[NamedParameter], config: Config) -> list[NamedParameter]:
    """Returns `parameters` with the wires that `config` gives them."""
    return [dataclasses.replace(p, wire=config.wire_number(p.name, p.tensor, p.other_names)) for p in parameters]


def trainable(parameters: Sequence[NamedParameter] | None) -> list[NamedParameter]:
    """Returns the parameters that require gradients now; an empty list for None."""
    return [p for p in parameters or [] if p.tensor.requires_grad]


class Places:
    """Where a module has its parameters: finds those that have been replaced or converted since.

    Cheap enough for every forward pass: it compares the entries of the modules' tables, about 50 ns each.
    """

    def __init__(self, module: torch.nn.Module, parameters: Sequence[NamedParameter]) -> None:
        self._module, self._parameters = module, parameters
        self._kinds = [(p.tensor.dtype, p.tensor.device) for p in parameters]
        self._look()

    def replaced(self) -> list[int]:
        """The indices of parameters in whose place there is another tensor, which requires gradients."""
        if all(map(operator.is_, map(dict.get, self._tables, self._keys), self._values)):
            return []
        now = dict(self._module.named_parameters(remove_duplicate=False))
        known = {id(p.tensor) for p in self._parameters}
        found = []
        for index, parameter in enumerate(self._parameters):
            tensor = now.get(parameter.name)
            if tensor is not None and id(tensor) not in known and tensor.requires_grad:
                found.append(index)
        if not found:
            self._look()  # modules have other places, the parameters are the same
        return found

    def describe(self, replaced: Sequence[int], converted: Sequence[int]) -> str:
        """What has happened to these parameters, for an error; never empty if there is one."""
        indices = sorted({*replaced, *converted})
        said = [self._describe(index, index in replaced) for index in indices[:3]]
        more = len(indices) - len(said)
        return "; ".join(said) + (f"; and {more} more parameters have changed" if more else "")

    def _describe(self, index: int, is_replaced: bool) -> str:
        parameter, (dtype, device) = self._parameters[index], self._kinds[index]
        if is_replaced:
            return f"{parameter.name!r} is another tensor"
        now = parameter.tensor
        if now.dtype != dtype:
            was, is_now = (str(each).removeprefix("torch.") for each in (dtype, now.dtype))
        elif now.device != device:
            was, is_now = f"on {device}", f"on {now.device}"
        else:
            return f"{parameter.name!r} was converted and converted back"
        return f"{parameter.name!r} was {was} and is {is_now}"

    def _look(self) -> None:
        known = {id(p.tensor) for p in self._parameters}
        entries = []
        for module in self._module.modules():
            children, tensors = module._modules, module._parameters
            if isinstance(children, dict) and isinstance(tensors, dict):  # not so in TorchScript, which keeps its own
                entries += [(children, key, child) for key, child in children.items()]
                entries += [(tensors, key, tensor) for key, tensor in tensors.items() if id(tensor) in known]
        self._tables, self._keys, self._values = zip(*entries, strict=True) if entries else ((), (), ())


def has_sparse_gradient(module: torch.nn.Module) -> bool:
    """Whether the gradient of the module's `weight` is sparse."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


def device_of(named: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of the gradients, or of frozen parameters if all are frozen; cpu if there are no parameters."""
    return next((tensor.device for tensor in _with_gradients(named)), torch.device("cpu"))


def _with_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that require gradients, or all if none does, because any may be trained later."""
    return [tensor for _, tensor in named if tensor.requires_grad] or [tensor for _, tensor in named]


def synchronised_parameters(
    named: Sequence[tuple[str, torch.Tensor]], configs: Sequence[Config]
) -> list[NamedParameter]:
    """See :func:`named_parameters`.

    Raises:
        RuntimeError: the gradients are on several devices.
    """
    devices = sorted({str(tensor.device) for tensor in _with_gradients(named)})
    if len(devices) > 1:
        raise RuntimeError(
            f"fusedcomm: the gradients are on several devices, {devices}; one is supported: move the model to one "
            "device on each rank"
        )
    return named_parameters(named, configs)


class ParameterWatch:
    """Notices that a module has other parameters than when this object was made: ``load_state_dict(assign=True)``, and
    whoever assigns a parameter or a module, puts them in the place of those that are synchronized.

    Args:
        ignored: names of parameters that may be replaced.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self._ignored = weakref.ref(module), ignored
        # Kept, so that no other tensor gets the address of one.
        self._known = {id(parameter): parameter for parameter in module.parameters()}
        self._look_at(module)

    def unknown(self) -> str:
        """The name of a parameter that requires a gradient and is new in the module; empty if there is none."""
        module = self._module()
        if module is None or self._ids() == self._seen:
            return ""
        has_unknown = False
        for name, parameter in module.named_parameters():
            # functional_call() puts tensors of other types in place of parameters for the time of a call.
            if id(parameter) in self._known or name in self._ignored or not isinstance(parameter, torch.nn.Parameter):
                continue
            has_unknown = True
            if parameter.requires_grad:
                return name
        if not has_unknown:
            self._look_at(module)
        return ""

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
            held += inside._parameters.values()
            held += inside._modules.values()
        return list(map(id, held))
