"""Nested values as JSON and tensors, without pickle: nothing that is unpacked runs code of whoever packed it.

None, bool, int, float and str are themselves; anything else is a list that begins with its kind. The classes of named
tuples and enums are looked up among the modules that this process has imported.
"""

import collections
import enum
import json
import sys
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, set, dict)}
_POSSIBLE = (
    "tensors, numbers, text, bytes, numpy's numbers and arrays, named tuples and enums of a module, and lists, tuples, "
    "sets, deques and dicts of these"
)


class _Unknown(Exception):
    """A value that cannot be packed. The arguments: what it is, and from inside to outside where."""


def pack(value: Any, what: str) -> tuple[bytes, list[torch.Tensor]]:
    """`value` without the elements of its tensors, and the tensors, in order. A numpy array is a tensor of bytes.

    Raises TypeError for what cannot be packed. what: names the value there.
    """
    tensors: list[torch.Tensor] = []
    try:
        return json.dumps(_encoded(value, tensors)).encode(), tensors
    except _Unknown as error:
        kind, *where = error.args
        why = f"{what}{''.join(reversed(where))} is {kind}"
    except RecursionError:
        why = f"{what} contains itself"
    except ValueError as error:  # JSON's
        why = f"{what}: {error}"
    raise TypeError(f"fusedcomm: {why}, and another rank cannot be given that, but {_POSSIBLE}")


def unpack(packed: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The value of :func:`pack` with new CPU tensors, whose elements are to be written, and these in order."""
    tensors: dict[int, torch.Tensor] = {}
    value = _decoded(json.loads(packed), tensors)
    return value, [tensors[index] for index in sorted(tensors)]


def _encoded(part: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(part)
    if kind in _PLAIN:
        return part
    if isinstance(part, torch.Tensor):
        return _of_tensor(part, tensors)
    if _SEQUENCES.get(kind.__name__) is kind:
        return [kind.__name__, _items(part, tensors)]
    if _MAPPINGS.get(kind.__name__) is kind:
        return [kind.__name__, _pairs(part, tensors), _encoded(getattr(part, "__dict__", None), tensors)]
    if kind is collections.defaultdict:
        factory = part.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise _Unknown(f"a defaultdict of {factory!r}")
        return ["defaultdict", name, _pairs(part, tensors)]
    if kind is collections.deque:
        return ["deque", part.maxlen, _items(part, tensors)]
    if kind in (bytes, bytearray):
        return [kind.__name__, part.hex()]
    if kind is complex:
        return ["complex", part.real, part.imag]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(part).removeprefix("torch.")]
    if isinstance(part, tuple) and hasattr(kind, "_fields") and _class(kind.__module__, kind.__qualname__) is kind:
        return ["namedtuple", kind.__module__, kind.__qualname__, _items(part, tensors)]
    if isinstance(part, enum.Enum) and part.name in kind.__members__:
        if _class(kind.__module__, kind.__qualname__) is kind:
            return ["enum", kind.__module__, kind.__qualname__, part.name]
    return _of_numpy(part, tensors)


def _items(part: Any, tensors: list[torch.Tensor]) -> list:
    found = []
    for index, each in enumerate(part):
        try:
            found.append(_encoded(each, tensors))
        except _Unknown as error:
            raise _Unknown(*error.args, f"[{index}]") from None
    return found


def _pairs(part: Any, tensors: list[torch.Tensor]) -> list:
    found = []
    for key, value in part.items():
        try:
            found.append([_encoded(key, tensors), _encoded(value, tensors)])
        except _Unknown as error:
            raise _Unknown(*error.args, f"[{key!r}]") from None
    return found


def _of_tensor(part: torch.Tensor, tensors: list[torch.Tensor]) -> list:
    kind = type(part)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or part.device.type == "meta":
        raise _Unknown(f"a {kind.__module__}.{kind.__qualname__} on {part.device}")
    if part.layout is not torch.strided or part.is_quantized:
        raise _Unknown(f"a tensor of {part.layout}, {part.dtype}")
    tensors.append(part.detach().resolve_conj().resolve_neg())
    is_trained = part.requires_grad if isinstance(part, torch.nn.Parameter) else None
    return ["tensor", len(tensors) - 1, str(part.dtype).removeprefix("torch."), list(part.shape), is_trained]


def _of_numpy(part: Any, tensors: list[torch.Tensor]) -> list:
    kind, numpy = type(part), sys.modules.get("numpy")
    is_array = numpy is not None and kind is numpy.ndarray
    if numpy is None or not (is_array or isinstance(part, numpy.generic)):
        raise _Unknown(f"a {kind.__module__}.{kind.__qualname__}")
    if part.dtype.kind in "OV" or part.dtype.itemsize == 0:
        raise _Unknown(f"a {kind.__module__}.{kind.__qualname__} of {part.dtype}")
    if not is_array:
        return ["generic", part.dtype.str, part.tobytes().hex()]
    tensors.append(torch.frombuffer(bytearray(part.tobytes() or b"\0"), dtype=torch.uint8)[: part.nbytes])
    return ["ndarray", len(tensors) - 1, part.dtype.str, list(part.shape)]


def _decoded(part: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if not isinstance(part, list):
        return part
    kind, *rest = part
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decoded(each, tensors) for each in rest[0])
    if kind in _MAPPINGS:
        made = _MAPPINGS[kind](_mapping(rest[0], tensors))
        if rest[1] is not None:
            vars(made).update(_decoded(rest[1], tensors))
        return made
    if kind == "tensor":
        index, dtype, shape, is_trained = rest
        tensors[index] = made = torch.empty(shape, dtype=getattr(torch, dtype))
        return made if is_trained is None else torch.nn.Parameter(made, requires_grad=is_trained)
    if kind == "defaultdict":
        return collections.defaultdict(None if rest[0] is None else _FACTORIES[rest[0]], _mapping(rest[1], tensors))
    if kind == "deque":
        return collections.deque((_decoded(each, tensors) for each in rest[1]), rest[0])
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(rest[0])
    if kind == "complex":
        return complex(*rest)
    if kind in ("dtype", "device"):
        return getattr(torch, rest[0]) if kind == "dtype" else torch.device(rest[0])
    if kind in ("namedtuple", "enum"):
        module, name, content = rest
        return _of_class(kind, module, name, content, tensors)
    import numpy  # whoever packed it has it

    if kind == "generic":
        return numpy.frombuffer(bytes.fromhex(rest[1]), rest[0])[0]
    index, dtype, shape = rest
    array = numpy.empty(shape, dtype)
    tensors[index] = torch.from_numpy(array.reshape(-1).view(numpy.uint8))
    return array


def _mapping(pairs: list, tensors: dict[int, torch.Tensor]) -> dict:
    return {_decoded(key, tensors): _decoded(value, tensors) for key, value in pairs}


def _of_class(kind: str, module: str, name: str, content: Any, tensors: dict[int, torch.Tensor]) -> Any:
    found = _class(module, name)
    if kind == "enum" and isinstance(found, enum.EnumMeta):
        return found.__members__[content]
    if kind == "namedtuple" and isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return tuple.__new__(found, [_decoded(each, tensors) for each in content])  # nothing of the class runs
    raise TypeError(
        f"fusedcomm: the members' state has a {module}.{name}, and this process has no such {kind}: import its module "
        "before members.carry()"
    )


def _class(module: str, name: str) -> Any:
    """What an imported module has under that name; None if there is none."""
    found = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, "__dict__", {}).get(each)
    return found
