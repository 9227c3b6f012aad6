"""The state of LocalSteps, for a checkpoint of this rank."""

from fusedcomm.local_steps.messages import Message
from fusedcomm.local_steps.progress import Progress
from fusedcomm.session import state_dict as engine_state
from fusedcomm.session.session import Session

VERSION = 2
KEYS = {
    "version",
    "schedule",
    "wire",
    "steps",
    "merges",
    "snapshot",
    "merged",
    "parameters",
    "under_way",
    "engine",
}


def save(of: Progress, session: Session) -> dict:
    """See :meth:`fusedcomm.LocalSteps.state_dict`."""
    message, state = of.under_way, of.state
    return {
        "version": VERSION,
        "schedule": of.schedule.record(),
        "wire": session.config.wire,
        "steps": of.steps,
        "merges": of.merges,
        "snapshot": of.snapshot,
        "merged": {each.name: view.clone() for each, view in zip(state.merged, state.views(state.anchor), strict=True)},
        "parameters": _checksum(of),
        "under_way": None
        if message is None
        else {"began": message.began, "due": message.due, "own": message.own.clone(), "mean": message.mean.clone()},
        "engine": engine_state.state_dict(session, consolidated=False),
    }


def _checksum(of: Progress) -> int:
    """A checksum of the parameters, as they are on this rank."""
    return int(of.state.checksum(of.state.read()))


def load(of: Progress, session: Session, saved: dict) -> None:
    """See :meth:`fusedcomm.LocalSteps.load_state_dict`."""
    check(of, session, saved)
    engine_state.load_state_dict(session, saved["engine"])
    for each, view in zip(of.state.merged, of.state.views(of.state.anchor), strict=True):
        view.copy_(saved["merged"][each.name])
    of.steps, of.merges, of.snapshot = saved["steps"], saved["merges"], saved["snapshot"]
    if of.window is not None:
        of.window.begin()
    message, device = saved["under_way"], of.state.anchor.device
    of.under_way = message and Message(
        began=message["began"],
        due=message["due"],
        own=message["own"].to(device, copy=True),
        mean=message["mean"].to(device, copy=True),
        is_read=True,
    )


def check(of: Progress, session: Session, saved: dict) -> None:
    """Raises ValueError if `saved` cannot be loaded. Changes nothing."""
    if not isinstance(saved, dict) or KEYS - saved.keys():
        missing = sorted(KEYS - saved.keys()) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"fusedcomm: this is no state of LocalSteps: missing {missing}")
    if saved["version"] != VERSION:
        raise ValueError(f"fusedcomm: state version {saved['version']!r} is not known; this fusedcomm reads {VERSION}")
    then = {**saved["schedule"], "wire": saved["wire"]}
    for option, value in {**of.schedule.record(), "wire": session.config.wire}.items():
        if then.get(option) != value:
            raise ValueError(
                f"fusedcomm: the state was saved with {option}={then.get(option)!r}, and here it is {value!r}: use "
                "that, or call finish() before saving and make a new LocalSteps without its state"
            )
    shapes = {each.name: tuple(each.local.shape) for each in of.state.merged}
    found = {name: tuple(tensor.shape) for name, tensor in saved["merged"].items()}
    if shapes != found:
        name = next(name for name in {**shapes, **found} if shapes.get(name) != found.get(name))
        there = f"{found.get(name)} in the state and {shapes.get(name)} in the model"
        raise ValueError(f"fusedcomm: {name} has shape {there}: load a state of this model")
    if _checksum(of) != saved["parameters"]:
        raise ValueError(
            "fusedcomm: the model's parameters are not those that were saved with this state: make LocalSteps first, "
            "then load this rank's model and optimizer, then this state"
        )
