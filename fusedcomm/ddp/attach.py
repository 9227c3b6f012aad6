"""``fusedcomm.attach``: one line that gives a DDP module the native hook."""

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env
from fusedcomm.autotune.search import WIRE as AUTO
from fusedcomm.autotune.search import Tuning
from fusedcomm.autotune.space import Space
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import Config, LocalOptions
from fusedcomm.ddp.handle import Handle, handles, targets
from fusedcomm.ddp.module import (
    bucket_nbytes_caps,
    device_of,
    named_tensors,
    options_to_agree,
    refuse_options,
    refuse_sparse,
    synchronised_parameters,
    wait_for_delayed,
)
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter
from fusedcomm.session.session import Session


def attach(
    ddp: DistributedDataParallel,
    wire: str = "bf16",
    *,
    sum: str = "auto",
    exempt: tuple[str, ...] | None = None,
    block: int | None = None,
    rotate: bool = False,
    wire_for: Mapping[str, str] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    error_feedback: bool | str | None = None,
    predivide: float | str = "auto",
    chunk_nbytes: int | None = None,
    chunks_in_flight: int | None = None,
    codec_threads: int | None = None,
    isa: str | None = None,
    sm_limit: int | None = None,
    verify_every: int = 0,
    measure_every: int = 1000,
    fallback_error: float | None = None,
    fallback_wire: str = "bf16",
    hosts: str | Sequence[Sequence[int]] | None = None,
    local_wire: str | None = None,
    wires: Sequence[str] | None = None,
    tuned: Tuning | str | os.PathLike | None = None,
    stall_after: float | None = None,
    quiet: bool = False,
) -> Handle:
    """Replaces DDP's gradient all-reduce by fusedcomm's, natively. Call it on every rank, before or between steps.

    Args:
        ddp: the module that DistributedDataParallel wraps, parameters on cpu over a gloo group or on one cuda device
            over an NCCL group.
        wire: what travels: "fp32", "bf16", "fp16", or codes with a scale for every `block` elements: "int8", "fp8"
            (e4m3), "int4". Or "auto": the first steps try DDP's own all-reduce, `wires` and, of the best
            of them, other sums and chunks where those are left open; the ranks keep what makes their steps shortest, or
            the more exact if it is within 3% (docs/autotune.md). Whatever else is given here is for all that is tried.
        sum: "exact" (fp32 all-reduce), "direct" (all-reduce in the 16-bit wire), "two-shot" (each rank takes the fp32
            sum of a part of all ranks' encoded chunks, in rank order, and encodes it again), "one-shot" (every rank
            gets all ranks' encoded chunks and takes the fp32 sum: of two ranks as many bytes, rounded once), or "auto":
            by world size and bucket size, as the printed plan says.
        exempt: parameters that travel exactly, in the same payload: "1d" (biases, norms) and names with wildcards, of
            a tied parameter any of its names. None means ("1d",) for wires with scales, unless wire_for has a wire for
            "1d", and () for the others.
        block: wires with scales only: elements that share a scale of `wire`; a power of two from 32 to 4096. None: 128,
            for int4 32. Those of wire_for have the default.
        rotate: wires with scales only: runs of 32 elements are multiplied by a Hadamard matrix before they are
            quantised and by its inverse afterwards, so that an outlier costs its block less. Helps int4 on
            heavy-tailed gradients (docs/accuracy.md). An Inf or NaN becomes NaN in its whole run.
        wire_for: wires of their own for some parameters, in the same payload: {"lm_head.*": "bf16", "*.mlp.*": "int4"}.
            Patterns as for exempt, which goes first; then the first that matches. "fp32" is as exempt. Two that give a
            tied parameter, by different names, different wires are an error.
        rounding: "nearest", or "stochastic": up or down by chance, such that the mean of many roundings is right.
            Nearest has half the worst error; stochastic does not lose what is small in the same direction every time.
        seed: rounding="stochastic" only: the same seed, step and buckets give the same bits, on any device.
        error_feedback: True: what encoders leave out of a step is added to the next one, so that rounding delays
            gradients instead of changing them. Residuals are kept in fp32 (4 bytes for each element, and by two-shot as
            much again divided by the ranks), or, as "bf16", in half of that. They stay with their parameters when DDP
            rebuilds its buckets, and are in ``state_dict()``. Needs a two-shot or one-shot sum, which "auto" takes for
            all but small buckets. With hosts a rank keeps those of what it sums for its host (4 bytes divided by the
            host's ranks), and what `local_wire` leaves out is lost.
        predivide: fp16 only: gradients are divided by it before the wire, and the sum multiplied by it and divided by
            the world size afterwards, in fp32. "auto": a power of two near √world_size for direct, else 1.
        chunk_nbytes: most bytes of a packed bucket that one collective carries, at least 4096. None: 16 MiB
            on cuda; on cpu what takes 2 ms on the link, which is timed at attach (3 ms among more than two ranks, 4 ms
            by one-shot, 8 ms by "direct" of two): 32 KiB to 1 MiB for each rank, at most 8 MiB in all. A bucket summed
            exactly in its own memory is not cut.
        chunks_in_flight: chunks under way at once, 1 to 64. None: as many as 4 MiB hold, from 4 to 16; 4 on cuda.
            Scratch is about 2 · chunk_nbytes · chunks_in_flight, by one-shot world_size times it.
        codec_threads: cpu only: threads that share a codec stage; None: the environment, else by the host's cores.
        isa: cpu only: instruction set of the codec; None: the environment, else the best this machine has.
        sm_limit: cuda only: most multiprocessors that one kernel of ours uses. None: an eighth of the GPU's, and all of
            them for the last bucket of a backward pass, beside which nothing is left to compute.
        verify_every: in every so many steps one bucket, another each time, is also summed exactly, in fp32, and its
            result compared: ``stats().verified`` has the errors. That step waits for the extra bytes. 0: never.
        measure_every: in one of so many steps every bucket's relative quantisation error on this rank is measured:
            ``stats().quantisation_error``. Takes one pass over the residual, and 4 bytes for each element where there
            is no fp32 residual. 0: never.
        fallback_error: a bucket whose mean verify_every found to be off by more, relatively, has its parameters sent
            in fallback_wire from the second step after that on, those whose wire is less exact; said once, with the
            numbers. With error_feedback a result also contains what earlier steps left out. Attaching again, a restart
            or another process group begin with `wire` again. None: never.
        fallback_wire: with fallback_error: "bf16", "fp16" or "fp32"; one that is more exact than `wire`.
        hosts: sums on two levels, for links between hosts that are slower than those within: first over the ranks of a
            host, in `local_wire`, then over hosts, in `wire`, so that each rank sends 1/L of what it would send to
            other hosts, where L is the number of ranks on a host. "auto": ranks with the same host name share a host;
            or a list of each host's ranks, [[0, 1], [2, 3]]. Every host must have as many ranks; one host, or one rank
            on each, is one level, as the plan then says. Needs the two-shot sum, which "auto" takes for all but small
            buckets; what is summed exactly goes over all ranks at once. The order of addition is another than without.
            None: one level; with wire="auto", unless it has error_feedback, two are tried where they can be had.
        local_wire: what travels within a host: "bf16", "fp16" or "fp32", rounded to nearest once more. None: "bf16", or
            "fp32" with wire="fp32", which is not to be rounded on its way.
        wires: with wire="auto": what may travel beside DDP's own exact all-reduce, which is always tried. None: "fp32",
            unless another argument is not for it, and "bf16".
        tuned: with wire="auto": what ``tuning()`` has returned before, or the path where its ``save()`` has put it.
            Nothing is tried then; unless it is of another number of ranks, model or device, or of wires that are not
            allowed, which a warning says.
        stall_after: seconds. If a bucket is under way and nothing has moved for so long, the ranks are asked what they
            have under way, and each that waits warns once, naming the slow or missing rank, the step, the bucket and
            the stage; training goes on. So it is if one moves, but has been the oldest under way for so long, as on a
            link that crawls, and again when one takes twice as long. May differ between ranks. None: 60, or a third of
            the group's timeout if that is less. A failure is explained in the same way, in the error's text.
        quiet: do not print the plan on rank 0.

    Returns:
        A handle with ``stats()``, ``plan()``, ``tuning()``, ``trace()``, ``nonfinite_report()``, ``detach()``,
        ``state_dict()`` and ``load_state_dict()``.

    On cuda the kernels are compiled here, which takes some seconds the first time, and a training step cannot be
    captured into a CUDA graph: the hook raises RuntimeError under capture.

    The mean is over the ranks of DDP's group: ``Join(divide_by_initial_world_size=False)`` cannot be seen by a hook.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel.
        ValueError: an argument is out of range, or two cannot go together.
        RuntimeError: the module already has a hook or a DDP option that cannot combine, a device or backend has no
            path, or the ranks do not agree; the last with the same text on every rank.
    """
    options = {
        "sum": sum,
        "exempt": exempt,
        "block": block,
        "rotate": rotate,
        "wire_for": wire_for,
        "rounding": rounding,
        "seed": seed,
        "error_feedback": error_feedback,
        "predivide": predivide,
        "chunk_nbytes": chunk_nbytes,
        "chunks_in_flight": chunks_in_flight,
        "verify_every": verify_every,
        "measure_every": measure_every,
        "fallback_error": fallback_error,
        "fallback_wire": fallback_wire,
        "hosts": hosts,
        "local_wire": local_wire,
    }
    local = LocalOptions(isa, codec_threads, sm_limit, stall_after)
    quiet = quiet or env.quiet()
    space = Space(wires, options) if wire == AUTO else None
    if space is not None:
        configs = [space.config(candidate) for candidate in space.first]
    else:
        for name, value in (("wires", wires), ("tuned", tuned)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is for wire='auto', and this is wire={wire!r}: leave one of them out"
                )
        configs = [Config(wire=wire, **options)]
    _check_module(ddp)
    named = named_tensors(ddp.module, ddp.parameters_to_ignore)
    device = device_of(named)
    parameters, problem = [], None
    try:
        refuse_options(ddp)
        wait_for_delayed(ddp)
        parameters = synchronised_parameters(named, configs)
        if space is not None:
            refuse_sparse(ddp, device)
    except (RuntimeError, ValueError) as error:  # of this rank, maybe: the others have to know
        problem = error
    if space is None:
        runs = Session(
            configs[0],
            ddp.process_group,
            parameters,
            local,
            device,
            announce=not quiet,
            also_agree=options_to_agree(ddp),
            problem=problem,
        )
    else:
        runs = _tuner(ddp, space, parameters, local, device, tuned, announce=not quiet, problem=problem)
    target = targets.get(ddp)
    if target is None:
        target = _C.HookTarget(ddp.process_group)
        try:
            _C.register_ddp_hook(ddp.reducer, target)
        except RuntimeError as error:
            runs.stop("its module refused the hook")
            raise RuntimeError(
                "fusedcomm: this DDP module already has a built-in communication hook; a reducer takes one hook for "
                "life, so wrap the model in a new DistributedDataParallel"
            ) from error
        ddp.logger._set_comm_hook_name("fusedcomm")
        targets[ddp] = target
    handle = Handle(ddp, runs, target)
    handles[ddp] = handle
    if ddp.process_group.rank() == 0 and not quiet:
        # The other ranks go on: where nobody reads what is printed, or it cannot be encoded, so must this one.
        with contextlib.suppress(Exception):
            print(handle.plan(), flush=True)
    return handle


def _check_module(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"fusedcomm.attach takes a DistributedDataParallel module, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model)"
        )
    if ddp in handles:
        raise RuntimeError(
            "fusedcomm: this module already has fusedcomm attached; call .detach() on the handle before attaching again"
        )


def _tuner(
    ddp: DistributedDataParallel,
    space: Space,
    parameters: list[NamedParameter],
    local: LocalOptions,
    device: torch.device,
    tuned: Tuning | str | os.PathLike | None,
    announce: bool,
    problem: Exception | None,
) -> Tuner:
    try:
        if isinstance(tuned, (str, os.PathLike)):
            tuned = Tuning.load(tuned)
        elif tuned is not None and not isinstance(tuned, Tuning):
            raise ValueError(f"tuned={tuned!r} is not possible: use what tuning() returned, or the path of its save()")
    except ValueError as error:
        tuned, problem = None, problem or error
    if tuned is not None:
        tuned = dataclasses.replace(tuned, loaded=True)
    module = weakref.ref(ddp)
    return Tuner(
        space,
        ddp.process_group,
        parameters,
        local,
        device,
        announce=announce,
        also_agree=options_to_agree(ddp),
        caps=lambda: bucket_nbytes_caps(module()),
        tuned=tuned,
        problem=problem,
    )
