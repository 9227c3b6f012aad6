"""Objects for other ranks, as JSON and tensors, without pickle: what is unpacked runs no code of whoever packed it.

None, bool, int, float and str are themselves; anything else is a list that begins with its kind. The classes of named
tuples and enums are looked up among the modules that this process has imported. Who trusts the sender, as Horovod's
front end does once it has checked a signature, may say how everything else becomes bytes.
"""

import collections
import enum
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, set, dict)}
_POSSIBLE = (
    "tensors, numbers, text, bytes, numpy's numbers and arrays, named tuples and enums of a module, and lists, tuples, "
    "sets, deques and dicts of these"
)


Maker: TypeAlias = Callable[[int, torch.dtype, list[int], str], torch.Tensor]
"""Makes the tensor of an index, of a dtype and shape; the last argument is the type of the sender's device."""


class _Unknown(Exception):
    """A value that cannot be packed. The arguments: what it is, and from inside to outside where."""


def pack(value: Any, what: str) -> tuple[bytes, list[torch.Tensor]]:
    """`value` without the elements of its tensors, and the tensors, in order. A numpy array is a tensor of bytes.

    what: names the value in errors. Raises TypeError for a part that cannot be packed.
    """
    packer = _Packer()
    try:
        return json.dumps(packer.encoded(value)).encode(), packer.tensors
    except _Unknown as error:
        kind, *where = error.args
        why = f"{what}{''.join(reversed(where))} is {kind}"
    except RecursionError:
        why = f"{what} contains itself"
    except ValueError as error:  # JSON's
        why = f"{what}: {error}"
    raise TypeError(f"fusedcomm: {why}, and another rank cannot be given that, but {_POSSIBLE}")


def unpack(packed: bytes, make: Maker | None = None) -> tuple[Any, list[torch.Tensor]]:
    """The value of :func:`pack` with tensors whose elements are to be written, and these in order.

    make: makes the tensors; None: new ones on CPU. Raises TypeError for a class that this process has not.
    """
    unpacker = _Unpacker(make or _new_on_cpu)
    value = unpacker.decoded(json.loads(packed))
    return value, [unpacker.tensors[index] for index in sorted(unpacker.tensors)]


def _new_on_cpu(index: int, dtype: torch.dtype, shape: list[int], device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the elements of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ranges(tensors: Sequence[torch.Tensor], begin: int, end: int) -> list[memoryview]:
    """The bytes [begin, end) of all tensors' elements, one after another, in the order of each tensor's indices.

    Those of contiguous CPU tensors are views of their memory.
    """
    found, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        first, last = max(begin - at, 0), min(end - at, nbytes)
        if first < last:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            found.append(memoryview(flat[first:last].cpu().numpy()))
        at += nbytes
    return found


def fill(tensors: Sequence[torch.Tensor], content: torch.Tensor) -> None:
    """Writes the bytes of :func:`ranges`, all of them, to the tensors. content: uint8 [nbytes_of(tensors)] on CPU."""
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            values = content[at : at + nbytes].clone().view(tensor.dtype).view(tensor.shape)
            tensor.copy_(values)
            at += nbytes


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def encoded(self, part: Any) -> Any:
        kind = type(part)
        if kind in _PLAIN:
            return part
        if isinstance(part, torch.Tensor):
            return self._of_tensor(part)
        if _SEQUENCES.get(kind.__name__) is kind:
            return [kind.__name__, self._items(part)]
        if _MAPPINGS.get(kind.__name__) is kind:
            return [kind.__name__, self._pairs(part), self.encoded(getattr(part, "__dict__", None))]
        if kind is collections.defaultdict:
            factory = part.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and _FACTORIES.get(name) is not factory:
                raise _Unknown(f"a defaultdict of {factory!r}")
            return ["defaultdict", name, self._pairs(part)]
        if kind is collections.deque:
            return ["deque", part.maxlen, self._items(part)]
        if kind in (bytes, bytearray):
            return [kind.__name__, part.hex()]
        if kind is complex:
            return ["complex", part.real, part.imag]
        if kind in (torch.dtype, torch.device):
            return [kind.__name__, str(part).removeprefix("torch.")]
        if isinstance(part, tuple) and hasattr(kind, "_fields") and _class(kind.__module__, kind.__qualname__) is kind:
            return ["namedtuple", kind.__module__, kind.__qualname__, self._items(part)]
        if isinstance(part, enum.Enum) and part.name in kind.__members__:
            if _class(kind.__module__, kind.__qualname__) is kind:
                return ["enum", kind.__module__, kind.__qualname__, part.name]
        return self._of_numpy(part)

    def _items(self, part: Any) -> list:
        found = []
        for index, each in enumerate(part):
            try:
                found.append(self.encoded(each))
            except _Unknown as error:
                raise _Unknown(*error.args, f"[{index}]") from None
        return found

    def _pairs(self, part: Any) -> list:
        found = []
        for key, value in part.items():
            try:
                found.append([self.encoded(key), self.encoded(value)])
            except _Unknown as error:
                raise _Unknown(*error.args, f"[{key!r}]") from None
        return found

    def _of_tensor(self, part: torch.Tensor) -> list:
        kind = type(part)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or part.device.type == "meta":
            raise _Unknown(f"a {kind.__module__}.{kind.__qualname__} on {part.device}")
        if part.layout is not torch.strided or part.is_quantized:
            raise _Unknown(f"a tensor of {part.layout}, {part.dtype}")
        self.tensors.append(part.detach().resolve_conj().resolve_neg())
        is_trained = part.requires_grad if isinstance(part, torch.nn.Parameter) else None
        return [
            "tensor",
            len(self.tensors) - 1,
            str(part.dtype).removeprefix("torch."),
            list(part.shape),
            is_trained,
            part.device.type,
        ]

    def _of_numpy(self, part: Any) -> list:
        kind, numpy = type(part), sys.modules.get("numpy")
        is_array = numpy is not None and kind is numpy.ndarray
        if numpy is None or not (is_array or isinstance(part, numpy.generic)):
            raise _Unknown(f"a {kind.__module__}.{kind.__qualname__}")
        if part.dtype.kind in "OV" or part.dtype.itemsize == 0:
            raise _Unknown(f"a {kind.__module__}.{kind.__qualname__} of {part.dtype}")
        if not is_array:
            return ["generic", part.dtype.str, part.tobytes().hex()]
        self.tensors.append(torch.frombuffer(bytearray(part.tobytes() or b"\0"), dtype=torch.uint8)[: part.nbytes])
        return ["ndarray", len(self.tensors) - 1, part.dtype.str, list(part.shape)]


class _Unpacker:
    def __init__(self, make: Maker) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._make = make

    def decoded(self, part: Any) -> Any:
        if not isinstance(part, list):
            return part
        kind, *rest = part
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.decoded(each) for each in rest[0])
        if kind in _MAPPINGS:
            made = _MAPPINGS[kind](self._mapping(rest[0]))
            if rest[1] is not None:
                vars(made).update(self.decoded(rest[1]))
            return made
        if kind == "tensor":
            index, dtype, shape, is_trained, device = rest
            self.tensors[index] = made = self._make(index, getattr(torch, dtype), shape, device)
            return made if is_trained is None else torch.nn.Parameter(made, requires_grad=is_trained)
        if kind == "defaultdict":
            return collections.defaultdict(None if rest[0] is None else _FACTORIES[rest[0]], self._mapping(rest[1]))
        if kind == "deque":
            return collections.deque((self.decoded(each) for each in rest[1]), rest[0])
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(rest[0])
        if kind == "complex":
            return complex(*rest)
        if kind in ("dtype", "device"):
            return getattr(torch, rest[0]) if kind == "dtype" else torch.device(rest[0])
        if kind in ("namedtuple", "enum"):
            module, name, content = rest
            return self._of_class(kind, module, name, content)
        import numpy  # whoever packed it has it

        if kind == "generic":
            return numpy.frombuffer(bytes.fromhex(rest[1]), rest[0])[0]
        index, dtype, shape = rest
        array = numpy.empty(shape, dtype)
        self.tensors[index] = torch.from_numpy(array.reshape(-1).view(numpy.uint8))
        return array

    def _mapping(self, pairs: list) -> dict:
        return {self.decoded(key): self.decoded(value) for key, value in pairs}

    def _of_class(self, kind: str, module: str, name: str, content: Any) -> Any:
        found = _class(module, name)
        if kind == "enum" and isinstance(found, enum.EnumMeta):
            return found.__members__[content]
        if kind == "namedtuple" and isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
            return tuple.__new__(found, [self.decoded(each) for each in content])  # nothing of the class runs
        raise TypeError(f"fusedcomm: a state has a {module}.{name}: import that {kind} before members.carry()")


def _class(module: str, name: str) -> Any:
    """What an imported module has under that name; None if there is none."""
    found = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, "__dict__", {}).get(each)
    return found
