"""The arguments that DataParallel has in common with DistributedDataParallel: those that cannot apply are refused."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.reducer.parameters import is_ignored


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group that is given; the default group if none is. Raises RuntimeError as DDP does."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("fusedcomm.DataParallel: Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"fusedcomm.DataParallel: Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None and not dist.is_initialized():
        raise RuntimeError("fusedcomm.DataParallel needs ranks: call torch.distributed.init_process_group first")
    return process_group if process_group is not None else dist.group.WORLD


def has_buffers(module: object) -> bool:
    """Whether it is a module with buffers."""
    return isinstance(module, nn.Module) and next(module.buffers(), None) is not None


def check_module(module: object, ignored: Collection[str]) -> torch.device:
    """Returns the device of the parameters that DataParallel synchronizes.

    Raises:
        TypeError: `module` is no module, or is a DistributedDataParallel.
        ValueError: the parameters are on several types of devices.
        RuntimeError: no parameter requires a gradient, or one is not initialized.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fusedcomm.DataParallel takes a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, DistributedDataParallel):
        name = type(module).__name__
        raise TypeError(f"fusedcomm.DataParallel takes a model, and this is a {name}: give it ddp.module")
    parameters = [(name, p) for name, p in module.named_parameters() if not is_ignored(name, ignored)]
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(f"fusedcomm.DataParallel: {name!r} is not initialized: run a forward pass of the module")
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise RuntimeError("fusedcomm.DataParallel: no parameter requires a gradient: call the module itself")
    types = sorted({parameter.device.type for _, parameter in parameters})
    if len(types) > 1:
        raise ValueError(f"fusedcomm.DataParallel: the parameters are on several types of devices, {types}")
    return parameters[0][1].device


def check_devices(
    device: torch.device,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Returns `device_ids` and `output_device` as numbers; None and None if no device is named.

    Raises:
        ValueError: they name several devices, a device for a module on cpu, or another one than the module's.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"fusedcomm.DataParallel: device_ids={list(device_ids)!r}: use None, or one device")
    named = [*(device_ids or ()), *([output_device] if output_device is not None else ())]
    for value in named:
        if device.type == "cpu" or not _names(value, device):
            given = f"device_ids={device_ids!r} and output_device={output_device!r}"
            raise ValueError(f"fusedcomm.DataParallel: {given}: use {device}, or None; for a module on cpu, None")
    if not device_ids:
        return None, None
    return [device.index], device.index


def _names(value: int | torch.device | str, device: torch.device) -> bool:
    """Whether `value` is the device, its number, or its type without a number."""
    if isinstance(value, int):
        return value == device.index
    named = torch.device(value)
    return named.type == device.type and named.index in (None, device.index)
