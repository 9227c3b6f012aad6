"""Front ends on the simulated accelerator of tests/native, in real rank processes: models, backward passes, optimizers
and collectives are work of its streams, and what misses a wait ends the process with the names of both.

The device is called "sim". It has the kernels that attaching would compile; tests/native/sim_kernels.cpp lets the codec
of the CPU do their work. All other operators run on the CPU, too, on the streams' threads.
"""

import ctypes
import datetime
import functools
import gc
import types
from pathlib import Path

import torch
import torch.distributed as dist
from cuda_stress import LIBRARY
from patience import HANG_S
from ranks import Ranks

from fusedcomm.config import Chunks, Config, Feedback
from fusedcomm.devices import cuda
from fusedcomm.native import _C
from fusedcomm.ranks import channels, torch_groups
from fusedcomm.session import session
from fusedcomm.session.parameters import grad_dtypes

DEVICE = "sim"
BACKEND = "cpu:gloo,sim:sim"
"""Of process groups on the device."""

CHUNKS = Chunks(nbytes=4096, in_flight=2)
"""Several, so that packing, the wire and unpacking are on streams of their own."""
CONFIGS = {
    "hook": Config("int8", sum="two-shot", feedback=Feedback(), chunks=CHUNKS),
    "DataParallel": Config("int8"),
    "FSDP2": Config("int8", chunks=CHUNKS),
}
"""Of front ends, by their names in front_ends.py."""

_libraries: list[ctypes.PyDLL] = []
"""The one that this process has loaded."""


def _prepare(rank: int, world_size: int, path: str) -> None:
    """Loads the library into this process, unless it has it, and makes its accelerator torch's."""
    if _libraries:
        return
    library = ctypes.PyDLL(path)
    library.sim_device.restype = library.sim_backend.restype = ctypes.py_object
    library.sim_backend.argtypes = [ctypes.py_object]
    library.sim_device.argtypes = [ctypes.py_object, ctypes.c_bool]
    for function in (library.sim_waits, library.sim_num_blocks, library.sim_allocators_events):
        function.restype = ctypes.c_int64
    library.sim_begin(ctypes.c_uint64(1))
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = types.ModuleType(f"torch.{DEVICE}")
    module.is_initialized = module.is_available = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.manual_seed_all = lambda seed: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.Stream = lambda device=None, priority=0: torch.Stream(torch.device(DEVICE, 0))
    module.Event = lambda: torch.Event(torch.device(DEVICE, 0))
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = lambda stream: stream
    torch._register_device_module(DEVICE, module)
    dist.Backend.register_backend(
        DEVICE,
        lambda store, rank, size, timeout: library.sim_backend(dist.ProcessGroupGloo(store, rank, size, timeout)),
        devices=[DEVICE],
    )
    torch_groups.BACKENDS[DEVICE] = (DEVICE,)
    dist.ProcessGroupNCCL = _Nccl
    torch_groups.own_nccl = functools.partial(_noted, torch_groups.own_nccl)
    channels.group_timeout = lambda group, device: datetime.timedelta(seconds=HANG_S)
    session.Session._path = lambda of, two_levels=None: _Path(of, two_levels)
    make = channels.make_host_channels
    channels.make_host_channels = lambda *args: channels.HostChannels(
        *map(library.sim_backend, vars(make(*args)).values())
    )
    library.sim_count()
    _libraries.append(library)


own_backends: list[str] = []
"""The names of the communicators of fusedcomm's own that this process has made."""


def _noted(own_nccl, store, name, *arguments, **options):
    own_backends.append(name)
    return own_nccl(store, name, *arguments, **options)


class _Nccl:
    """Makes what torch_groups.own_nccl() takes for a ProcessGroupNCCL."""

    class Options:
        pass

    def __new__(cls, store, rank, size, options):
        return _libraries[0].sim_backend(dist.ProcessGroupGloo(store, rank, size, options._timeout))


class _Path:
    """Stands in for a CudaPath, with the same kernels."""

    codec = "simulated"
    s_per_byte = None

    def __init__(self, of: session.Session, two_levels: bool | None = None) -> None:
        self.has_two_levels = of.config.needs_two_levels if two_levels is None else two_levels
        dtypes, reduces_rows = grad_dtypes(of.parameters, of._reduces_rows), of._reduces_rows
        self._kernels = cuda.kernel_variants(of.config, of.world_size, dtypes, self.has_two_levels, reduces_rows)

    def connect(self, process_group, device, store):
        library = _libraries[0]
        backend = process_group._get_backend(device)
        native_device = library.sim_device(list(self._kernels), self.has_two_levels)
        return native_device, _C.StreamTransport(backend, device, nccl=library._name)


def _free_memory(rank: int, world_size: int) -> None:
    gc.collect()
    ctypes.CDLL(_libraries[0]._name).sim_free_memory()  # without the GIL, as functions of a PyDLL are not


def num_blocks() -> int:
    """Blocks of the device's memory that this rank has. Frees those that it has given back."""
    torch.accelerator.synchronize()
    _free_memory(0, 1)
    return _libraries[0].sim_num_blocks()


def allocators_events() -> int:
    """The events that torch's allocator would have recorded, and asked about, for memory that streams share."""
    return _libraries[0].sim_allocators_events()


def waits() -> int:
    """How often this rank has waited for the device, on any thread; 0 where there is none."""
    return _libraries[0].sim_waits() if _libraries else 0


class RanksOnStreams(Ranks):
    """Ranks whose run() takes backend=BACKEND. folder: of the library; see cuda_stress.build()."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._library = str(folder / LIBRARY)
        super().__init__(num_ranks)

    def _start(self) -> None:
        super()._start()
        self._num_prepared = 0

    def run(self, function, *args, world_size: int = 2, backend: str = BACKEND) -> list:
        if world_size > self._num_prepared:
            super().run(_prepare, self._library, world_size=world_size)
            self._num_prepared = world_size
        try:
            return super().run(function, *args, world_size=world_size, backend=backend)
        finally:
            super().run(_free_memory, world_size=world_size)
