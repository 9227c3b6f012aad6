"""The state of a ShardedOptimizer in torch's format: of each parameter whole tensors, divided over the ranks.

What an owner has lies anywhere in a parameter. A checkpoint has each parameter's state with the parameter's shape, so
another number of ranks, other buckets and plain optimizers can load it.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fusedcomm.optimizer.exchange import Exchange, written_bits
from fusedcomm.optimizer.owner import Owner, State
from fusedcomm.optimizer.parts import Target, index_by_id, laid_out, shaped
from fusedcomm.optimizer.trial import fresh_state, keys_of_state
from fusedcomm.session.checksums import in_memory_order
from fusedcomm.session.objects import everybodys
from fusedcomm.session.session import Session

MASTER = "master"
"""The key of an owner's fp32 copy."""
WRITTEN = "written"
"""The key of the checksum of the parameter that had the fp32 copy."""


def state_dict(
    optimizer: torch.optim.Optimizer,
    owner: Owner,
    exchanges: Sequence[Exchange],
    targets: Sequence[Target],
    session: Session,
) -> State:
    """Returns the state in torch's format: {"state": {number: {key: value}}, "param_groups": […]}. A collective
    call."""
    mesh = DeviceMesh.from_group(session.process_group, session.device.type)
    own = _own_state(owner, exchanges, targets)
    known: dict[int, dict[str, Any]] = {}
    described = {i: {key: _description(value) for key, value in state.items()} for i, (_, state) in own.items()}
    for of_rank in everybodys(described, session, "state_dict()"):
        for i, keys in of_rank.items():
            known.setdefault(i, keys)
    index_of = index_by_id(targets)
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        for n, p in zip(numbers, group["params"], strict=True):
            i = index_of.get(id(p), -1)
            if i in known:
                state[n] = {
                    key: _whole(targets[i], own.get(i), key, kind, mesh, session) for key, kind in known[i].items()
                }
    return {"state": state, "param_groups": groups}


class _Pieces(list):
    """Tensors with an element for each of a piece's, of all pieces of a parameter on this rank."""


def _description(value: Any) -> Any:  # noqa: ANN401
    """The dtype of pieces; any other value itself."""
    return value[0].dtype if isinstance(value, _Pieces) else value


def _own_state(
    owner: Owner, exchanges: Sequence[Exchange], targets: Sequence[Target]
) -> dict[int, tuple[list, dict[str, Any]]]:
    """For each target: its pieces on this rank, and by key a list of their tensors [elements of the piece], or a
    value."""
    found: dict[int, tuple[list, dict[str, Any]]] = {}
    for i, leaves in owner.leaves.items():
        optimizer, group = owner.of_leaf(leaves[0][2])
        states = [dict(optimizer.state.get(leaf, {})) for _, _, leaf in leaves]
        if not all(states):
            states = fresh_state(optimizer, group, [leaf for _, _, leaf in leaves])
        merged: dict[str, Any] = {}
        for key, first in states[0].items():
            leaf = leaves[0][2]
            is_of_elements = isinstance(first, torch.Tensor) and first.shape == leaf.shape
            if leaf.dim() == 0 and is_of_elements:
                is_of_elements = first.device == leaf.device  # an accelerator's counts of steps are on the host
            merged[key] = _Pieces(in_memory_order(each[key]) for each in states) if is_of_elements else first
        if any(exchanges[at].keeps_master(piece) for at, piece, _ in leaves):
            merged[MASTER] = _Pieces(in_memory_order(leaf) for _, _, leaf in leaves)
            merged[WRITTEN] = written_bits(targets[i]).cpu()
        found[i] = [piece for _, piece, _ in leaves], merged
    return found


def _whole(
    target: Target,
    own: tuple[list, dict[str, Any]] | None,
    key: str,
    kind: Any,
    mesh: DeviceMesh,
    session: Session,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A value of the parameter's state on every rank."""
    if not isinstance(kind, torch.dtype):
        return kind.clone() if isinstance(kind, torch.Tensor) else kind
    flat = torch.zeros(target.tensor.numel(), dtype=kind, device=session.device)
    if own is not None:
        for piece, values in zip(own[0], own[1][key], strict=True):
            flat[piece.begin : piece.end].copy_(values)
    dist.all_reduce(flat, group=session.process_group)  # an element has one owner: the others add zeros
    whole = shaped(flat, target.layout).contiguous()
    if whole.dim() == 0:
        return whole
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def load_state_dict(
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    owner: Owner,
    exchanges: Sequence[Exchange],
    targets: Sequence[Target],
) -> None:
    """Takes what state_dict(), or a plain optimizer's, has returned. A collective call if it has DTensors."""
    groups, saved = optimizer.param_groups, given["param_groups"]
    lengths = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if lengths[0] != lengths[1]:
        raise ValueError(f"fusedcomm: the state has groups of {lengths[1]} parameters: use the same, not {lengths[0]}")
    index_of = index_by_id(targets)
    whole: dict[int, dict[str, Any]] = {}
    for group, of_saved in zip(groups, saved, strict=True):
        for p, number in zip(group["params"], of_saved["params"], strict=True):
            state = given["state"].get(number)
            i = index_of.get(id(p))
            if state is None or i is None:
                continue
            whole[i] = {
                key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()
            }
            _check(targets[i], whole[i])
    _check_keys(whole, saved, owner, targets)
    for group, of_saved in zip(groups, saved, strict=True):
        group.update(copy.deepcopy({key: value for key, value in of_saved.items() if key != "params"}))
    for exchange in exchanges:
        exchange.refresh(everything=True)
    for i, leaves in owner.leaves.items():
        for at, piece, leaf in leaves:
            of_optimizer = owner.of_leaf(leaf)[0].state
            of_optimizer.pop(leaf, None)
            if i in whole:
                state = {key: _part(targets[i], key, value, piece, leaf) for key, value in whole[i].items()}
                master, written = state.pop(MASTER, None), state.pop(WRITTEN, None)
                if master is not None and exchanges[at].keeps_master(piece):
                    leaf.copy_(master)
                    if written is not None:
                        exchanges[at].trust_master(i, int(written))
                of_optimizer[leaf] = state


def _check(target: Target, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != target.tensor.shape:
            shapes = f"{list(value.shape)} in the state, and the parameter {list(target.tensor.shape)}"
            raise ValueError(f"fusedcomm: {key} of {target.name} has the shape {shapes}: load a state of this model")


def _check_keys(
    whole: Mapping[int, Mapping[str, Any]], saved: Sequence[dict[str, Any]], owner: Owner, targets: Sequence[Target]
) -> None:
    """Raises ValueError for a state that lacks what its optimizer reads in a step, such as that of another class. On
    every rank, whoever owns the parameter. whole: by target. saved: the groups, whose hyperparameters are to be
    taken."""
    index_of = index_by_id(targets)
    for (optimizer, group, params), of_saved in zip(owner.made, saved, strict=True):
        needed: dict[tuple[int, bool], set[str]] = {}
        for i in (index_of[id(p)] for p in params if id(p) in index_of):
            state, target = whole.get(i), targets[i]
            if not state:  # the optimizer makes it in the next step
                continue
            kind = target.tensor.dim(), target.whole
            if kind not in needed:
                needed[kind] = keys_of_state(optimizer, {**group, **of_saved}, target)
            if missing := sorted(needed[kind] - state.keys()):
                name = type(optimizer).__name__
                raise ValueError(
                    f"fusedcomm: the state of {target.name} has {sorted(state)}, and {name} also needs {missing}: load "
                    f"a state of {name}"
                )


def _part(target: Target, key: str, value: Any, piece: Any, leaf: torch.Tensor) -> Any:  # noqa: ANN401
    """A piece's part of a value of the whole parameter's state. As for torch, "step" is a count, which stays as it
    is."""
    if not isinstance(value, torch.Tensor) or value.shape != target.tensor.shape or key == "step":
        return value.clone() if isinstance(value, torch.Tensor) else value
    flat = in_memory_order(laid_out(value.to(leaf.device), target.layout))[piece.begin : piece.end]
    part = shaped(flat, target.layout) if leaf.shape == target.layout.shape else flat
    return part.to(leaf.dtype if value.is_floating_point() else value.dtype, copy=True)
