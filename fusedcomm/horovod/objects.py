"""Broadcasts of whole objects: parameters, an optimizer's state, and anything that can be pickled."""

import pickle
from collections.abc import Mapping
from typing import Any

import torch

import fusedcomm.horovod.ops as ops
from fusedcomm.horovod.operations import Call, finished, told_to_others
from fusedcomm.horovod.order import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, member_of
from fusedcomm.ranks.objects import pack, unpack

try:  # also pickles lambdas and classes of the script
    import cloudpickle as pickler
except ImportError:
    pickler = pickle  # type: ignore[misc]


def broadcast_parameters(params: Mapping[str, Any] | list, root_rank: int) -> None:
    """Copies the root's values into the tensors on every other rank.

    params: model.state_dict(), or a list of parameters or of (name, parameter). Values that are no tensors are skipped
    in a state_dict. Raises ValueError for anything else, such as a generator, which could be read once only.
    """
    if isinstance(params, Mapping):
        named = sorted((name, value) for name, value in params.items() if isinstance(value, torch.Tensor))
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"broadcast_parameters: expected a dict or a list, got {type(params).__name__}: pass model.state_dict() or "
            "list(model.named_parameters())"
        )
    finish = [_start_parameter(tensor, root_rank, name) for name, tensor in named]
    for each in finish:
        each()


def _start_parameter(tensor: torch.Tensor, root_rank: int, name: str | None) -> Any:
    """Starts a broadcast in place and returns what ends it."""
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)  # messages have real numbers
    if data.is_contiguous():
        handle = ops.broadcast_async_(data, root_rank, name)
        return lambda: synchronize(handle)
    handle = ops.broadcast_async(data.contiguous(), root_rank, name)
    return lambda: data.copy_(synchronize(handle))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copies the root's optimizer state and options to every other rank, where the state may be empty.

    Nothing is unpickled. `model`: says which parameters have sparse gradients, where the state is empty. Raises
    ValueError for LBFGS, whose state is no table of tensors, and TypeError, on every rank, if the root's state has
    something that ranks/objects.py cannot pack."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: the state of torch.optim.LBFGS cannot be broadcast")
    found, _ = member_of(global_process_set)
    if not optimizer.state:
        _give_zero_gradients(optimizer, model)
    state_dict = optimizer.state_dict()
    try:
        packed, own = pack([state_dict["state"], _options(state_dict), ""], "the optimizer's state")
    except TypeError as error:
        packed, own = pack([None, None, str(error)], "an error")
    sent = _from_root(packed, root_rank, f"optimizer.{type(optimizer).__name__}", global_process_set)
    device_of = {each.device.type: each.device for group in optimizer.param_groups for each in group["params"]}
    (state, groups, problem), tensors = unpack(
        sent,
        # On this rank's own device.
        lambda _, dtype, shape, device: torch.empty(shape, dtype=dtype, device=device_of.get(device, device)),
    )
    if problem:
        raise TypeError(problem)
    tensors = own if found.rank == root_rank else tensors
    broadcast_parameters([(f"state.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank)
    if found.rank != root_rank:
        _assign(optimizer, state, groups)


def _give_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Gives parameters without a gradient one of zeros, as Horovod does for an optimizer without state. Parameters
    whose gradients are sparse are left alone: a dense one of zeros would make their next gradient dense."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    modules = model.modules() if model is not None else ()
    sparse = {
        id(module.weight)
        for module in modules
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse:
                parameter.grad = torch.zeros_like(parameter)


def _assign(optimizer: torch.optim.Optimizer, state: dict, groups: list[dict]) -> None:
    """Puts state and options into the optimizer's own tables, which schedulers and other optimizers may share."""
    for own, options in zip(optimizer.param_groups, groups, strict=True):
        own.update(options)
    unique = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    optimizer.state.clear()
    for i, parameter in enumerate(unique):  # state_dict() numbers the parameters in this order
        if i in state:
            optimizer.state[parameter] = state[i]


def _options(state_dict: dict) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in state_dict["param_groups"]]


def _as_tensor(content: bytes) -> torch.Tensor:
    """uint8 of shape (nbytes,)."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _from_root(content: bytes, root_rank: int, name: str, process_set: ProcessSet) -> bytes:
    """The root's bytes on every rank; `content` is read on the root only."""
    data = _as_tensor(content if member_of(process_set)[0].rank == root_rank else b"")
    nbytes = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(ops.broadcast_async_(nbytes, root_rank, f"{name}.sz", process_set))
    if not data.numel():
        data = torch.empty(int(nbytes.item()), dtype=torch.uint8)
    synchronize(ops.broadcast_async_(data, root_rank, f"{name}.t", process_set))
    return bytes(data.untyped_storage())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank; `obj` is read on the root only. It is pickled, with cloudpickle if that is
    installed. `root_rank`: a rank of the job, also in a process set."""
    is_root = member_of(process_set)[0].rank == root_rank
    name = "broadcast_object" if name is None else name
    with told_to_others(Call("broadcast", None, f"{name}.sz", process_set)):
        content = pickler.dumps(obj) if is_root else b""
    received = _from_root(content, root_rank, name, process_set)
    return obj if is_root else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order. They are pickled, with cloudpickle if that is installed."""
    name = "allgather_object" if name is None else name
    call: Call[list[torch.Tensor]] = Call("allgather", None, name, process_set, is_group=True)
    with told_to_others(call):
        data = _as_tensor(pickler.dumps(obj))
        call.given = [torch.tensor([data.numel()], dtype=torch.int64), data]
    nbytes, gathered = finished(call)
    return [pickle.loads(bytes(part.clone().untyped_storage())) for part in gathered.split(nbytes.tolist())]
