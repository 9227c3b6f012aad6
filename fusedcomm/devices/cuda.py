"""Gradients on a CUDA device: kernels compiled once at attach, launched natively, over the process group's own NCCL."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fusedcomm import config, env, log
from fusedcomm.devices import compile_once
from fusedcomm.native import _C
from fusedcomm.ranks import groups, torch_groups

if TYPE_CHECKING:
    from fusedcomm.kernels.variants import Compiled

DRIVER = "libcuda.so.1"

LEAST_CAPABILITY = 75
"""Least compute capability of the GPU, as 10·major + minor: the oldest for which current torch builds have code."""

NUM_STREAMS, NUM_STREAMS_BY_HOST = 4, 6
"""Streams that run side by side: the backward pass's, and fusedcomm's for packing, for the wire and for unpacking. Sums
on two levels have three wires."""


class CudaPath:
    """One rank's device, before the ranks have agreed: its kernels are compiled, loaded and launched once.

    Args:
        two_levels: whether to prepare the kernels and streams for sums on two levels, too.
        reduces_rows: as for :func:`kernel_variants`.

    Raises:
        RuntimeError: there is no driver, the GPU is not supported, Triton cannot be used, or a kernel cannot be
            compiled or loaded.
        ValueError: an option is out of range, or is for another device.
    """

    s_per_byte = None
    """The link is not timed, because the size of chunks does not depend on it."""

    def __init__(
        self,
        cfg: config.Config,
        local: config.LocalOptions,
        process_group: groups.Group,
        device: torch.device,
        grad_dtypes: list[torch.dtype],
        announce: bool,
        two_levels: bool,
        reduces_rows: bool,
    ) -> None:
        self.has_two_levels = two_levels
        given = {"isa": local.isa, "codec_threads": local.codec_threads, "gradients on cuda": True}
        config.combinations.refuse("every front end", given)
        driver = _C.CudaDriver(DRIVER)
        capability = check_capability(device)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        from fusedcomm.kernels.variants import PACK_PROGRAMS_PER_SM

        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current on this thread; loading needs that
            kernels, compiler = load_kernels(
                driver, cfg, process_group.size(), grad_dtypes, capability, announce, two_levels, reduces_rows
            )
            self._device = _C.CudaDevice(
                kernels=kernels,
                device=device,
                isa=f"{compiler} sm_{capability}",
                num_pack_programs=PACK_PROGRAMS_PER_SM * num_sms,
                two_levels=two_levels,
                forced_sync=env.sync(),
            )
            self._device.warm_up()
        self.codec = self._device.isa

    def connect(
        self, process_group: groups.Group, device: torch.device, store: dist.Store
    ) -> tuple["_C.Device", "_C.C10dTransport"]:
        backend, why = process_group._get_backend(device), ""
        if env.nccl_through_torch():
            why = f"{env.NCCL}=torch"
        elif torch_groups.is_non_blocking(backend):
            why = "the group's communicators are non-blocking, and torch may free them between two calls"
        return self._device, _C.StreamTransport(backend, device, nccl=_C.TORCHS_CUDA, through_torch=why)


def check_capability(device: torch.device) -> int:
    """The GPU's compute capability as 10·major + minor. Raises RuntimeError if it is too old."""
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    if capability < LEAST_CAPABILITY:
        raise RuntimeError(
            f"fusedcomm: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
            f"{LEAST_CAPABILITY // 10}.{LEAST_CAPABILITY % 10} or later is supported. Use DDP's default all-reduce on "
            "this GPU."
        )
    return capability


def kernel_variants(
    cfg: config.Config,
    world_size: int,
    grad_dtypes: Sequence[torch.dtype],
    two_levels: bool | None = None,
    reduces_rows: bool = False,
) -> tuple["_C.KernelKey", ...]:
    """Every kernel that `cfg` can need for gradients of these dtypes.

    two_levels: whether sums can have two levels. None: if `cfg` needs that.
    reduces_rows: whether sums are reduce-scatters, whose last step is that of a one-shot.
    """
    if two_levels is None:
        two_levels = cfg.needs_two_levels
    from fusedcomm.kernels import variants

    return variants.engine_variants(
        cfg.formats,
        grad_dtypes,
        feedback=cfg.feedback is not None,
        local_wire=cfg.local_wire if two_levels else None,
        one_shot=reduces_rows or world_size > 1 and cfg.is_one_shot(world_size),
        keeps_residuals=True,  # also ranks that stand in for others under Join have no weight
        # `wire` is that of a module whose parameters are all gathered exactly.
        gathered=() if cfg.params == "fp32" else (cfg.wire, cfg.params),
    )


def triton() -> tuple[str, "Callable[[_C.KernelKey, int], Compiled]"]:
    """(name with version, function) of the kernels' compiler. The function compiles for a compute capability, 90 for
    example, or takes what Triton's cache has.

    Raises RuntimeError if Triton is missing or its version is not supported.
    """
    from fusedcomm.kernels.variants import TRITON

    try:
        from fusedcomm.kernels import compile
    except ImportError as error:
        raise RuntimeError(
            f"fusedcomm: Triton, which compiles the GPU's kernels, cannot be imported: {error}. Install it: "
            f'pip install "{TRITON}"'
        ) from error
    return f"triton {compile.check_triton()}", compile.compile


def load_kernels(
    driver: "_C.CudaDriver",
    cfg: config.Config,
    world_size: int,
    grad_dtypes: list[torch.dtype],
    capability: int,
    announce: bool,
    two_levels: bool | None = None,
    reduces_rows: bool = False,
) -> tuple["_C.KernelLoader", str]:
    """Every kernel that `cfg` can need for gradients of these dtypes, loaded in the current context, and the name of
    the compiler.

    Args:
        announce: whether to report what is compiled.
        two_levels, reduces_rows: as for :func:`kernel_variants`.
    """
    name, compile = triton()
    from fusedcomm.kernels.variants import TILE

    variants = kernel_variants(cfg, world_size, grad_dtypes, two_levels, reduces_rows)
    if announce:
        log.report(
            lambda: (
                f"fusedcomm: preparing {len(variants)} kernels for sm_{capability} with {name} "
                "(takes some seconds the first time; compiled kernels are cached)"
            )
        )
    loader = _C.KernelLoader(driver, TILE)
    made = compile_once.compiled(variants, lambda variant: compile(variant, capability))
    for compiled in made:
        load(loader, compiled)
    return loader, name


def load(loader: "_C.KernelLoader", compiled: "Compiled") -> None:
    """Loads one compiled kernel. Raises RuntimeError if its parameters are not those that the engine passes."""
    key = compiled.variant
    expected = tuple(_C.kernel_params(key.kernel))
    if tuple(compiled.params) != expected or compiled.num_scratch_pointers > _C.MAX_SCRATCH_POINTERS:
        raise RuntimeError(
            f"fusedcomm: kernel {key.kernel} was compiled with parameters {compiled.params} and "
            f"{compiled.num_scratch_pointers} scratch pointers; the engine passes {expected} and at most "
            f"{_C.MAX_SCRATCH_POINTERS}. The kernels and the extension have different versions: rebuild fusedcomm"
        )
    loader.load(
        key=key,
        cubin=compiled.cubin,
        symbol=compiled.symbol,
        num_threads=32 * compiled.num_warps,
        shared_nbytes=compiled.shared_nbytes,
        num_scratch_pointers=compiled.num_scratch_pointers,
    )
