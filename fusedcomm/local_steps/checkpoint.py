"""The state of LocalSteps, for a checkpoint of this rank."""

from fusedcomm.local_steps.messages import Message
from fusedcomm.local_steps.progress import Progress
from fusedcomm.session import state_dict as engine_state
from fusedcomm.session.session import Session

VERSION = 1
EARLIER = {"groups": 1, "warmup": 0, "state": "local"}
"""Options that earlier versions had, with the values that their states can be loaded with."""
KEYS = {
    "version",
    "schedule",
    "wire",
    "steps",
    "turns",
    "merges",
    "merged",
    "parameters",
    "under_way",
    "outer",
    "weights",
    "engine",
}


def save(of: Progress, session: Session) -> dict:
    """See :meth:`fusedcomm.LocalSteps.state_dict`."""
    return {
        "version": VERSION,
        "schedule": of.schedule.record(),
        "wire": session.config.wire,
        "steps": of.steps,
        "turns": of.turns,
        "merges": list(of.merges),
        "merged": {
            each.name: view.clone()
            for fragment in of.fragments
            for each, view in zip(fragment.merged, fragment.views(fragment.anchor), strict=True)
        },
        "parameters": _checksums(of),
        "under_way": [
            {
                "fragment": message.fragment.index,
                "number": message.merge,
                "began": message.began,
                "due": message.due,
                "own": message.own.clone(),
                "mean": message.mean.clone(),
            }
            for message in of.under_way
        ],
        "outer": None if of.outer is None else of.outer.optimizer.state_dict(),
        "weights": {"done": of.steps, "before": list(of.snapshots)},
        "engine": engine_state.state_dict(session, consolidated=False),
    }


def _checksums(of: Progress) -> list[int]:
    """Checksums of each fragment's parameters, as they are on this rank."""
    return [int(fragment.checksum(fragment.read())) for fragment in of.fragments]


def load(of: Progress, session: Session, state: dict) -> None:
    """See :meth:`fusedcomm.LocalSteps.load_state_dict`."""
    check(of, session, state)
    engine_state.load_state_dict(session, state["engine"])
    if of.outer is not None:
        of.outer.optimizer.load_state_dict(state["outer"])
    for fragment in of.fragments:
        for each, view in zip(fragment.merged, fragment.views(fragment.anchor), strict=True):
            view.copy_(state["merged"][each.name])
    of.steps, of.turns, of.merges = state["steps"], state["turns"], list(state["merges"])
    done = state["weights"]["done"]
    of.snapshots = [of.steps - (done - before) for before in state["weights"]["before"]]
    if of.window is not None:
        of.window.begin()
    device = of.fragments[0].anchor.device
    of.under_way[:] = [
        Message(
            fragment=of.fragments[saved["fragment"]],
            merge=saved["number"],
            began=saved["began"],
            due=saved["due"],
            own=saved["own"].to(device, copy=True),
            mean=saved["mean"].to(device, copy=True),
            is_read=True,
        )
        for saved in state["under_way"]
    ]


def check(of: Progress, session: Session, state: dict) -> None:
    """Raises ValueError if `state` cannot be loaded. Changes nothing."""
    if not isinstance(state, dict) or KEYS - state.keys():
        missing = sorted(KEYS - state.keys()) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"fusedcomm: this is no state of LocalSteps: missing {missing}")
    if state["version"] != VERSION:
        raise ValueError(f"fusedcomm: state version {state['version']!r} is not known; this fusedcomm reads {VERSION}")
    now = {**of.schedule.record(), **EARLIER, "wire": session.config.wire}
    saved = {**EARLIER, **state["schedule"], "wire": state["wire"]}
    for option, value in now.items():
        if saved.get(option) != value:
            raise ValueError(
                f"fusedcomm: the state was saved with {option}={saved.get(option)!r}, and here it is {value!r}: use "
                "that, or call finish() before saving and make a new LocalSteps without its state"
            )
    shapes = {each.name: tuple(each.local.shape) for fragment in of.fragments for each in fragment.merged}
    found = {name: tuple(tensor.shape) for name, tensor in state["merged"].items()}
    if shapes != found:
        name = next(name for name in {**shapes, **found} if shapes.get(name) != found.get(name))
        there = f"{found.get(name)} in the state and {shapes.get(name)} in the model"
        raise ValueError(f"fusedcomm: {name} has shape {there}: load a state of this model")
    if _checksums(of) != state["parameters"]:
        raise ValueError(
            "fusedcomm: the model's parameters are not those that were saved with this state: make LocalSteps first, "
            "then load this rank's model and optimizer, then this state"
        )
    if (state["outer"] is None) != (of.outer is None):
        raise ValueError("fusedcomm: only one of the state and this LocalSteps has an outer optimizer")
