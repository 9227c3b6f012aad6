"""Lets scripts that say ``import horovod.torch as hvd`` run as they are. Nothing here happens by itself."""

import functools
import importlib
import sys
import types
from collections.abc import Iterable
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
    "horovod.torch.elastic.sampler": "fusedcomm.horovod.elastic.sampler",
    "horovod.torch.elastic.state": "fusedcomm.horovod.elastic.state",
    "horovod.common.exceptions": "fusedcomm.horovod.errors",
    "horovod.common.process_sets": "fusedcomm.horovod.process_sets",
    "horovod.common.elastic": "fusedcomm.horovod.elastic",
}


# Modules of Horovod's that are made of what scripts import from them.
_MADE: dict[str, dict[str, Any]] = {
    "horovod": {"__path__": [], "is_fusedcomm": True, "__version__": "0.28.1"},
    "horovod.common": {"__path__": []},
    "horovod.torch.mpi_ops": {name: getattr(ours, name) for name in ours.__all__},
    "horovod.common.util": {
        "_cache": functools.cache,
        "env": env.changed,
        "extension_available": lambda ext_base_name, verbose=False: ext_base_name == "torch",
        "gloo_built": lambda verbose=False: ours.gloo_built(),
        "is_iterable": lambda value: isinstance(value, Iterable),
        "mpi_built": lambda verbose=False: ours.mpi_built(),
        "nccl_built": lambda verbose=False: bool(ours.nccl_built()),
        "split_list": split_list,
    },
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
    for name, contents in _MADE.items():
        modules[name] = types.ModuleType(name, "Stands in Horovod's place; see fusedcomm.horovod.install().")
        modules[name].__dict__.update(contents)
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        # Ours have submodules of these names already, or do not need them.
        if parent in modules and not modules[parent].__name__.startswith("fusedcomm"):
            setattr(modules[parent], last, module)
    ours.mpi_ops = modules["horovod.torch.mpi_ops"]  # type: ignore[attr-defined]
