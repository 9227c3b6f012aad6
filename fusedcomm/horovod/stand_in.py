"""Lets scripts that say ``import horovod.torch as hvd`` run as they are. Nothing here happens by itself."""

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

from fusedcomm import env
from fusedcomm.horovod.step_reducer import split_list

ours = importlib.import_module("fusedcomm.horovod")  # which imports this module when install() is called

# Modules of Horovod's, and the module of ours that is put in the place of each.
_SAME = {
    "horovod.torch": "fusedcomm.horovod",
    "horovod.torch.compression": "fusedcomm.horovod.compression",
    "horovod.torch.functions": "fusedcomm.horovod.objects",
    "horovod.torch.optimizer": "fusedcomm.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "fusedcomm.horovod.sync_batch_norm",
    "horovod.torch.elastic": "fusedcomm.horovod.elastic",
    "horovod.torch.elastic.state": "fusedcomm.horovod.elastic",
    "horovod.torch.elastic.sampler": "fusedcomm.horovod.elastic",
    "horovod.common.exceptions": "fusedcomm.horovod.errors",
    "horovod.common.process_sets": "fusedcomm.horovod.process_sets",
    "horovod.common.elastic": "fusedcomm.horovod.elastic",
}


def put_in_place() -> None:
    """Puts fusedcomm.horovod into sys.modules as `horovod.torch`, with the modules around it that scripts import.

    Raises RuntimeError if Horovod itself has been imported already.
    """
    there = sys.modules.get("horovod")
    if there is not None and not getattr(there, "is_fusedcomm", False):
        raise RuntimeError("Horovod itself has been imported: call fusedcomm.horovod.install() before `import horovod`")
    if there is not None:
        return
    modules = {name: importlib.import_module(target) for name, target in _SAME.items()}
    modules["horovod.torch.mpi_ops"] = _module("horovod.torch.mpi_ops", _mpi_ops())
    modules["horovod.common.util"] = _module("horovod.common.util", _util())
    modules["horovod.runner.util.threads"] = _module("horovod.runner.util.threads", {"in_thread": in_thread})
    for package in ("horovod", "horovod.common", "horovod.runner", "horovod.runner.util"):
        modules[package] = _module(package, {"__path__": []})
    modules["horovod"].__dict__.update(is_fusedcomm=True, __version__="0.28.1")
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        # Ours have submodules of these names already, or do not need them.
        if parent in modules and not modules[parent].__name__.startswith("fusedcomm"):
            setattr(modules[parent], last, module)
    ours.mpi_ops = modules["horovod.torch.mpi_ops"]  # type: ignore[attr-defined]


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "Stands in Horovod's place; see fusedcomm.horovod.install().")
    module.__dict__.update(contents)
    return module


def _mpi_ops() -> dict[str, Any]:
    return {name: getattr(ours, name) for name in ours.__all__ if name not in ("elastic", "install")}


def _util() -> dict[str, Any]:
    return {
        "_cache": cache,
        "env": env.changed,
        "extension_available": extension_available,
        "gloo_built": gloo_built,
        "mpi_built": mpi_built,
        "nccl_built": nccl_built,
        "is_iterable": lambda value: isinstance(value, Iterable),
        "split_list": split_list,
    }


def cache(function: Callable[[], Any]) -> Callable[..., Any]:
    """Remembers what the first call has returned, whatever its arguments were."""
    results: list[Any] = []

    @functools.wraps(function)
    def cached(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return cached


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a front end for the framework: for torch only."""
    return ext_base_name == "torch"


def gloo_built(verbose: bool = False) -> bool:
    """See state.py."""
    return ours.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """See state.py."""
    return ours.mpi_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether torch has NCCL and a GPU."""
    return bool(ours.nccl_built())


def in_thread(
    target: Callable[..., Any], args: tuple = (), name: str | None = None, daemon: bool = True, silent: bool = False
) -> threading.Thread:
    """Starts a thread that calls target(*args), and returns it. `silent`: what it raises is not printed."""

    def quietly() -> None:
        with contextlib.suppress(BaseException):
            target(*args)

    thread = threading.Thread(
        target=quietly if silent else target, args=() if silent else args, name=name, daemon=daemon
    )
    thread.start()
    return thread
