"""Writes fusedcomm/_C.pyi, by which editors and type checkers know the extension: names, arguments and types, as
pybind11 puts them into docstrings. setup.py runs this after it has built the extension.

    python csrc/bindings/stubs.py EXTENSION     # writes _C.pyi beside it
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

HEAD = '''"""The compiled extension. Written by the build: do not edit."""

import collections.abc
import typing

import torch
import torch._C._distributed_c10d

'''

# pybind11's spelling of types that Python spells otherwise.
SPELLED = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "typing.SupportsInt": "int",
    "typing.SupportsFloat": "float",
    "fusedcomm._C.": "",
    "torch.distributed.distributed_c10d.": "torch._C._distributed_c10d.",
}
_SIGNATURE = re.compile(r"^(?:\d+\. )?(\w*)\((.*)\) -> (.*)$", re.MULTILINE)


def spelled(text: str) -> str:
    """A type or a list of arguments as Python spells it."""
    for theirs, ours in SPELLED.items():
        text = text.replace(theirs, ours)
    # A default value that is no literal, and a C++ type that no binding names.
    text = re.sub(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>", "...", text)
    text = re.sub(r"\b\w+(?:::\w+)+(?:<.*?>)?|\bobject\b", "typing.Any", text)
    return re.sub(r"(?<!\| None) = None", " | None = None", text)


def signatures(function: object) -> list[str]:
    """The `name(arguments) -> type` of a bound function, one for each overload."""
    found = _SIGNATURE.findall(inspect.getdoc(function) or "")
    return [
        f"{name}({spelled(arguments)}) -> {spelled(result)}"
        for name, arguments, result in found
        if arguments != "*args, **kwargs"  # the line above a list of overloads
    ]


def function_lines(function: object, decorator: str | None = None) -> list[str]:
    """The lines of a bound function, with `decorator` above each."""
    found = signatures(function)
    lines = []
    for signature in found:
        lines += [f"@{decorator}"] if decorator else []
        lines += ["@typing.overload"] if len(found) > 1 else []
        lines.append(f"def {re.sub(r'self: [^,)]+', 'self', signature, count=1)}: ...")
    return lines


def attribute_lines(name: str, value: object) -> list[str]:
    """The lines of an attribute of a class or of the module."""
    if isinstance(value, property):
        result = (signatures(value.fget) or ["() -> typing.Any"])[0].rpartition(" -> ")[2]
        lines = ["@property", f"def {name}(self) -> {result}: ..."]
        return lines + ([f"@{name}.setter", f"def {name}(self, value: {result}) -> None: ..."] if value.fset else [])
    if inspect.isclass(value):
        return class_lines(value)
    if isinstance(value, staticmethod):
        return function_lines(value.__func__, "staticmethod")
    if callable(value):
        return function_lines(value)
    return [f"{name}: {type_of(value)}"]


def type_of(value: object) -> str:
    """The type of a constant of the module."""
    if isinstance(value, (list, tuple, dict)) and value:
        items = list(value.items() if isinstance(value, dict) else value)
        inner = ", ".join(map(type_of, items[0])) if isinstance(value, dict) else type_of(items[0])
        return f"tuple[{inner}, ...]" if isinstance(value, tuple) else f"{type(value).__name__}[{inner}]"
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "fusedcomm._C") else f"{kind.__module__}.{kind.__name__}"


def class_lines(kind: type) -> list[str]:
    """A bound class: its base, and what it adds to it."""
    base = kind.__base__
    ours = base is not None and base.__module__ == kind.__module__
    lines = []
    for name, value in sorted(vars(kind).items()):
        if name == "__init__" or not name.startswith("_"):
            members = attribute_lines(name, value)
            if isinstance(value, kind):  # a value of an enumeration
                members = [f"{name}: typing.ClassVar[{kind.__name__}]"]
            lines += members
    head = f"class {kind.__name__}({base.__name__}):" if ours else f"class {kind.__name__}:"
    return [head, *(f"    {line}" for line in lines or ["..."])]


def rendered(module: ModuleType) -> str:
    """The text of the stub."""
    blocks = [attribute_lines(name, value) for name, value in sorted(vars(module).items()) if not name.startswith("__")]
    return HEAD + "\n".join(line for block in blocks for line in block) + "\n"


def main() -> None:
    import torch.distributed  # noqa: F401  (loads the libraries, and has the types, that the extension uses)

    extension = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("fusedcomm._C", extension)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extension.with_name("_C.pyi").write_text(rendered(module))


if __name__ == "__main__":
    main()
