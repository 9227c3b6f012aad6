"""The state of LocalSteps, for a checkpoint after finish(): then the parameters are the merged state."""

from fusedcomm.local_steps.merges import Merges
from fusedcomm.session.session import Session

VERSION = 4
KEYS = {"version", "schedule", "wire", "steps", "merges", "parameters"}


def save(of: Merges, session: Session) -> dict:
    """See :meth:`fusedcomm.LocalSteps.state_dict`."""
    return {
        "version": VERSION,
        "schedule": of.schedule.record(),
        "wire": session.config.wire,
        "steps": of.steps,
        "merges": of.num_begun,
        "parameters": int(of.state.checksum()),
    }


def load(of: Merges, session: Session, saved: dict) -> None:
    """See :meth:`fusedcomm.LocalSteps.load_state_dict`."""
    check(of, session, saved)
    of.state.anchor.copy_(of.state.read())
    of.steps = of.snapshot = of.finished_at = saved["steps"]
    of.num_begun = session.synchronizer.step = saved["merges"]
    if of.window is not None:
        of.window.begin()


def check(of: Merges, session: Session, saved: dict) -> None:
    """Raises ValueError if `saved` cannot be loaded. Changes nothing."""
    if isinstance(saved, dict) and saved.get("version", VERSION) != VERSION:
        raise ValueError(
            f"fusedcomm: state version {saved['version']!r} is not known; this fusedcomm reads {VERSION}: make a new "
            "LocalSteps without its state"
        )
    if not isinstance(saved, dict) or KEYS - saved.keys():
        missing = sorted(KEYS - saved.keys()) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"fusedcomm: this is no state of LocalSteps: missing {missing}")
    then = {**saved["schedule"], "wire": saved["wire"]}
    for option, value in {**of.schedule.record(), "wire": session.config.wire}.items():
        if then.get(option) != value:
            raise ValueError(
                f"fusedcomm: the state was saved with {option}={then.get(option)!r}, and here it is {value!r}: use "
                "that, or make a new LocalSteps without its state"
            )
    if int(of.state.checksum(of.state.read())) != saved["parameters"]:
        raise ValueError(
            "fusedcomm: the model's parameters are not those that were saved with this state: load the model and the "
            "optimizer first, then this state"
        )
