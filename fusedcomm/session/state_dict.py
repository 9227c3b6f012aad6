"""An engine's state (step, non-finite counts, residuals), by parameter name: saved, loaded, and taken over."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fusedcomm.session.parameters import NamedParameter

if TYPE_CHECKING:
    from fusedcomm.session.session import Session

VERSION = 2
KEYS = {"version", "rank", "world_size", "step", "nonfinite", "error_feedback", "residuals"}


def state_dict(session: "Session", consolidated: bool) -> dict:
    """See :meth:`fusedcomm.ddp.handle.Handle.state_dict`."""
    (step, nonfinite), residuals, of_encoders = session.kept, {}, {}
    if session.has_engine:
        step, nonfinite = session.synchronizer.step, session.synchronizer.nonfinite_by_parameter()
        # A tensor made in inference mode, as in a trainer's evaluation, could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            residuals = session.synchronizer.residuals()
            of_encoders = {} if consolidated else session.synchronizer.residuals_of_encoders()
            if consolidated:
                residuals = _mean_over_ranks(session, residuals)
    return {
        "version": VERSION,
        "rank": None if consolidated else session.rank,
        "world_size": None if consolidated else session.world_size,
        "step": step,
        "nonfinite": nonfinite,
        "error_feedback": session.config.feedback is not None,
        "residuals": residuals,
        **({"residuals_of_encoders": of_encoders} if of_encoders else {}),
    }


def load_state_dict(session: "Session", state: dict) -> None:
    """See :meth:`fusedcomm.ddp.handle.Handle.load_state_dict`."""
    check(state, session.parameters, session.keeps_residuals, session.is_off)
    if not session.has_engine:
        session.kept = (state["step"], dict(state["nonfinite"]))
        return
    residuals, saved_by = state["residuals"], (state["rank"], state["world_size"])
    if residuals and saved_by not in ((session.rank, session.world_size), (None, None)):
        warnings.warn(
            f"fusedcomm: these residuals were saved by rank {saved_by[0]} of {saved_by[1]} and this is rank "
            f"{session.rank} of {session.world_size}: they are forgotten. Save state_dict(consolidated=True) to go on "
            "with another number of ranks.",
            stacklevel=3,
        )
        residuals = {}
    of_encoders = state.get("residuals_of_encoders", {}) if residuals else {}
    # Each call checks its names before it changes anything. check() has checked everything else.
    with torch.no_grad():
        session.synchronizer.restore_residuals(residuals, of_encoders=of_encoders)
    session.synchronizer.restore_nonfinite(state["nonfinite"])
    session.synchronizer.step = state["step"]


def take_over(session: "Session", old: "Session") -> None:
    """Copies the state of `old`, on the same ranks, into `session`, of some or all of its parameters. Between backward
    passes.

    `session` also weighs this rank, and the passes that have only added up, as `old` was asked to.
    """
    known = {parameter.name for parameter in session.parameters}
    counts, residuals = old.synchronizer.nonfinite_by_parameter(), old.synchronizer.residuals()
    session.synchronizer.restore_nonfinite({name: count for name, count in counts.items() if name in known})
    session.synchronizer.step = old.synchronizer.step
    session.synchronizer.weights.take_over(old.synchronizer.weights)
    session.synchronizer.restore_residuals({name: values for name, values in residuals.items() if name in known})


def check(state: dict, parameters: Sequence[NamedParameter] | None, keeps_residuals: bool, is_off: bool) -> None:
    """Raises ValueError if `state` cannot be loaded.

    Args:
        parameters: the module's; None: not known.
        keeps_residuals: whether the attachment keeps residuals.
        is_off: whether gradients go through DDP's own all-reduce, for good.
    """
    if not isinstance(state, dict):
        raise ValueError(f"not a fusedcomm state: a {type(state).__name__} instead of a dict")
    if state.get("version", VERSION) != VERSION:
        raise ValueError(f"state version {state['version']!r} is not known; this fusedcomm reads {VERSION}")
    missing = sorted(KEYS - state.keys())
    if missing:
        raise ValueError(f"not a fusedcomm state: {missing} missing, found {sorted(state)}")
    for key in ("nonfinite", "residuals"):
        if not isinstance(state[key], dict):
            raise ValueError(f"state[{key!r}] is a {type(state[key]).__name__}: it must be a dict by parameter name")
    step = state["step"]
    if not _is_count(step):
        raise ValueError(f"state['step'] is {step!r}: it must be a whole number of steps, 0 or more")
    known = {parameter.name for parameter in parameters or []}
    for name, count in state["nonfinite"].items():
        if not _is_count(count) or (known and name not in known):
            raise ValueError(f"state['nonfinite'][{name!r}] is {count!r}: use a count of a parameter of this model")
    for name, values in state["residuals"].items():
        if not isinstance(values, torch.Tensor) or not values.is_floating_point() or not values.isfinite().all():
            raise ValueError(f"state['residuals'][{name!r}] must be a tensor of finite floating-point numbers")
    if state["residuals"] and not keeps_residuals:
        why = "config='off'" if is_off else "feedback=None"
        raise ValueError(
            f"the state has residuals and this attachment keeps none ({why}): use "
            "feedback=fusedcomm.Feedback(…), or empty state['residuals']"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _mean_over_ranks(session: "Session", residuals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean by parameter name, where a residual that a rank lacks counts as zeros. A collective call."""
    what = "state_dict(consolidated=True)"
    sizes = {name: values.numel() for name, values in residuals.items()}
    sizes = {name: numel for theirs in session.gather("residuals", sizes, what) for name, numel in theirs.items()}
    sums = {}
    for name in sorted(sizes):
        sums[name] = torch.zeros(sizes[name], dtype=torch.float32, device=session.device)
        if name in residuals:
            sums[name].copy_(residuals[name])
    session.sum_over_ranks(list(sums.values()), what)
    return {name: total / session.world_size for name, total in sums.items()}
