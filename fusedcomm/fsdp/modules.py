"""A model as FSDP2 knows it: its modules with a parameter group, their parameters and process groups.

torch keeps this in private attributes, which have been the same since torch 2.11 but for one: a module has a list of
groups from 2.12 on. This file alone reads them.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor, distribute_tensor

CARRIED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that wires carry."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Parameters that FSDP2 reduces together: those of one module, or of several that were given to fully_shard as a
    list. A module with parameters on several meshes has one of these for each.

    `name`: of the module in the model, of several the first; empty for the model itself. With a number if the module
    has several of these.
    """

    name: str
    group: Any
    parameters: tuple["ShardedParameter", ...]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients are reduce-scattered; None with replicate(), which does not shard."""
        is_sharded = isinstance(self.group.mesh_info, FSDPMeshInfo)
        return self.group._reduce_scatter_process_group if is_sharded else None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with the same shards, over which gradients are all-reduced; None if each shard is on one rank."""
        is_replicated = isinstance(self.group.mesh_info, DDPMeshInfo)
        return self.group._all_reduce_process_group if is_replicated else None

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.group.device

    @property
    def has_own_comm(self) -> bool:
        """Whether something else has replaced its reduce-scatter."""
        return type(self.group._reduce_scatter_comm) is not DefaultReduceScatter

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients, between replicas too, and do not only add them up."""
        return self.group.reduce_grads and self.group.all_reduce_grads

    def is_read_at_once(self, output: torch.Tensor) -> bool:
        """Whether torch reads the output of a reduce-scatter before the backward pass ends: to add it to a gradient, to
        change its dtype or factor, to reduce it further, to copy it, or to give it to a hook."""
        group = self.group
        if getattr(group, "_all_reduce_hook", None) is not None or self.replicas is not None:
            return True
        if output.dtype not in (torch.float32, torch.bfloat16) or group.force_sum_reduction_for_comms:
            return True
        for each in group.fsdp_params:
            parameter = each.sharded_param
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if output.dtype != each.orig_dtype or each.offload_to_cpu or hooks or parameter.grad is not None:
                return True
        return False

    @property
    def num_gathers(self) -> int:
        """All-gathers of a step over all ranks. There are two if the forward pass drops what it has gathered; by
        default the model itself does not. With reshard_after_forward=n the second one is among n ranks, as a rule those
        of a host."""
        state = self.group.modules[0]._get_fsdp_state()
        keeps = not self.group._reshard_after_forward or (state._auto_reshard_after_forward and not self.name)
        return 1 if keeps or self.group._use_post_forward_mesh else 2

    @property
    def row_nbytes(self) -> int:
        """Bytes of this rank's slices in torch's own all-gather."""
        policy = self.group.mp_policy
        return sum(p.row_numel * (policy.param_dtype or p.tensor.dtype).itemsize for p in self.parameters)

    @property
    def has_extensions(self) -> bool:
        """Whether a parameter is a tensor that says itself what is gathered of it, as torchao's float8 tensors do."""
        return any(hasattr(p.native._sharded_local_tensor, "fsdp_pre_all_gather") for p in self.parameters)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of a rank's slices of the gradients, as torch itself would reduce them."""
        policy = self.group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype
        return sum(p.row_numel * (dtype or p.tensor.dtype).itemsize for p in self.parameters if p.is_trained)

    @property
    def title(self) -> str:
        """The name as people read it. Never empty."""
        return self.name or "(model)"

    @property
    def is_trained(self) -> bool:
        """Whether a parameter requires a gradient now."""
        return any(each.is_trained for each in self.parameters)

    def uses(self, reduce_scatter: ReduceScatter) -> bool:
        """Whether FSDP2 calls this reduce-scatter of the module's."""
        return self.group._reduce_scatter_comm is reduce_scatter

    def use(self, reduce_scatter: ReduceScatter, all_gather: AllGather) -> None:
        """Gives FSDP2 these collectives of the module."""
        # As set_custom_reduce_scatter() and set_custom_all_gather() do, which refuse a module with several groups.
        self.group._reduce_scatter_comm, self.group._all_gather_comm = reduce_scatter, all_gather

    @property
    def has_own_all_gather(self) -> bool:
        """Whether something else has replaced its all-gather."""
        return type(self.all_gather) not in (DefaultAllGather, ProcessGroupAllocAllGather)

    @property
    def all_gather(self) -> AllGather:
        """What gathers the parameters: torch's own, unless the user has replaced it."""
        return self.group._all_gather_comm


@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """`name`: in the model; of a tied parameter, the first."""

    name: str
    native: Any

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter: a DTensor of the whole parameter's shape."""
        return self.native.sharded_param

    @property
    def row_numel(self) -> int:
        """Elements of one rank's slice, padding included."""
        return self.native.padded_sharded_param_size.numel()

    @property
    def is_trained(self) -> bool:
        """Whether the parameter requires a gradient now."""
        return self.native.sharded_param.requires_grad

    def dtensor(self, row: torch.Tensor) -> DTensor:
        """The whole of which `row` is this rank's slice, with padding: [row_numel]. A DTensor like the parameter."""
        size, like = self.native.sharded_size, self.tensor
        local = row[: size.numel()].view(size).contiguous()
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def row(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice, with zeros as padding: fp32 [row_numel]. whole: from dtensor(), perhaps loaded since, or
        the whole tensor."""
        if not isinstance(whole, DTensor):
            like = self.tensor
            whole = distribute_tensor(
                whole.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
            )
        local = whole.to_local()
        row = torch.zeros(self.row_numel, dtype=torch.float32, device=local.device)
        row[: local.numel()] = local.detach().float().flatten()
        return row


def sharded_modules(model: nn.Module) -> tuple[list[Sharded], ValueError | None]:
    """The model's parameter groups, in the order of model.modules(), and why a reduce-scatter cannot be replaced: it
    has been replaced already."""
    found: list[Sharded] = []
    seen: set[int] = set()
    problem = None
    modules = {id(module): (index, name) for index, (name, module) in enumerate(model.named_modules())}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        for number, group in enumerate(groups):
            if id(group) in seen:  # of a module before, which was given to fully_shard together with this one
                continue
            seen.add(id(group))
            parameters = tuple(ShardedParameter(_name_of(each, modules), each) for each in group.fsdp_params)
            own_name = name if len(groups) == 1 else f"{name or 'model'} [{number}]"
            sharded = Sharded(own_name, group, parameters)
            if sharded.has_own_comm:
                own = type(group._reduce_scatter_comm).__name__
                problem = problem or ValueError(
                    f"fusedcomm: the reduce-scatter of {name or 'the model'} is {own} already: leave one of them out"
                )
            found.append(sharded)
    return found, problem


def _name_of(native: Any, modules: dict[int, tuple[int, str]]) -> str:
    """A parameter's name in the model, of a tied one the first. After a forward pass a module may still have the whole
    parameters, so they are not looked for among the model's.

    modules: number and name by id.
    """
    info = native._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    known = [(*modules[id(module)], name) for module, name in owners if id(module) in modules]
    _, owner, own = min(known, default=(0, "", info.param_name))
    return f"{owner}.{own}" if owner else own
