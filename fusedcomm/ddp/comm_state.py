"""The same engine behind PyTorch's usual call, ``ddp.register_comm_hook(state, hook)``.

Use it with trainers that register hooks themselves (Lightning, Accelerate). The engine starts at the first bucket. Each
bucket costs one call from the reducer into Python.
"""

import atexit
import copy
import itertools
import sys
import warnings

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedcomm import env
from fusedcomm.autotune.auto import chosen
from fusedcomm.config import Config, LocalOptions, Wire, combinations, local_options
from fusedcomm.ddp.module import named_tensors, refuse_delayed
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter, named_parameters
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import load_state_dict, state_dict, take_over
from fusedcomm.session.stats import Stats
from fusedcomm.session.surface import Sealed

# CommStates that no hook has been called with, by number: their wires.
_never_called: dict[int, str] = {}
_numbers = itertools.count()
_has_stepped = False  # whether an optimizer has stepped since the first CommState


class CommState(Sealed):
    """The state of :func:`comm_hook`: its configuration, and its engine once training has begun. One for each module.

    Args:
        config: a wire's name or a :class:`fusedcomm.Config`; see :func:`fusedcomm.autotune.auto.chosen`.
        local: as for :func:`fusedcomm.attach`.
        process_group: the group that DDP uses. None: the default group. A hook cannot see that DDP's group changes: set
            this object's attribute `process_group` to the new group then.
        module: the model. Needed only if `Config.wires` has patterns of names, because a hook sees no names.

    The mean is over all ranks of the group: a hook without the DDP module does not see
    ``Join(divide_by_initial_world_size=False)``, which :func:`fusedcomm.attach` supports.

    Raises:
        ValueError: an argument is out of range, or two cannot be combined.
        TypeError: `config` is of another type.
    """

    _shows: tuple[str, ...] = ("config", "load_state_dict", "process_group", "state_dict", "stats")

    def __init__(
        self,
        config: Config | Wire | None = None,
        *,
        local: LocalOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self.config = chosen(config, "CommState")
        given = {"weighted": self.config.weighted, "wires": self.config.name_patterns or None, "module": module}
        combinations.refuse("CommState", given)
        self.process_group = process_group
        self._module = module
        self._local = local_options(local)
        self._session: Session | None = None
        self._has_seen_a_pass = False  # if so, every parameter has been in a bucket
        self._loaded: dict | None = None  # state to load once there is a session
        self._lost: list[str] = []  # if this is a copy: arguments that could not be copied
        self._number = next(_numbers)
        if self._number == 0:
            _watch_first_step()
        _never_called[self._number] = self.config.wire
        self._seal()

    def session(self, device: torch.device) -> Session:
        """Returns the running session. The first call, and the first after the group has changed, starts it.

        Every rank must make that call.

        Args:
            device: where the bucket is; the engine moves gradients on that device.

        Raises: as :class:`Session`; RuntimeError if this object is a copy without its group or module.
        """
        if self._lost:
            lost = " and ".join(self._lost)
            raise RuntimeError(f"fusedcomm: this CommState is a copy, which has no {lost}: make a new one")
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        old = self._session
        if old is None or old.process_group is not group:
            parameters, problem = None, None
            try:
                parameters = self._parameters()
            except (TypeError, ValueError, RuntimeError) as error:  # of this rank's own module
                problem = error
            session = Session(self.config, group, parameters, self._local, device, problem=problem)
            try:
                if old is not None:
                    take_over(session, old)
                elif self._loaded is not None:
                    load_state_dict(session, self._loaded)
            except (TypeError, ValueError, RuntimeError) as error:  # of this rank's own state
                problem = error
            session.confirm(problem)
            if old is not None:
                old.stop("its CommState moved to another process group")
            self._session, self._loaded = session, None
        self._session.say_notices()
        return self._session

    def look_at(self, bucket: dist.GradBucket) -> None:
        """Raises RuntimeError in the first pass for DDP options that a hook without the DDP module cannot support."""
        _never_called.pop(self._number, None)
        if not self._has_seen_a_pass:
            refuse_delayed(bucket.parameters())
            self._has_seen_a_pass = bucket.is_last()

    def state_dict(self, consolidated: bool = False) -> dict:
        """As :meth:`fusedcomm.ddp.handle.Handle.state_dict`. Before the first bucket it returns what was loaded, and
        raises RuntimeError if nothing was."""
        if self._session is None and self._loaded is not None:
            return self._loaded
        if self._session is None:
            raise RuntimeError("fusedcomm: call state_dict() of a CommState after the first backward pass")
        return state_dict(self._session, consolidated)

    def load_state_dict(self, state: dict) -> None:
        """As :meth:`fusedcomm.ddp.handle.Handle.load_state_dict`. Before the first bucket it only keeps `state`."""
        if self._session is None:
            self._loaded = state
        else:
            load_state_dict(self._session, state)

    def stats(self) -> Stats | None:
        """Counts and times of this rank; None before the first bucket."""
        return None if self._session is None else self._session.stats()

    def __repr__(self) -> str:
        """One line, which waits for nothing: ``<fusedcomm.CommState: wire int8, sum auto, 2 ranks>``."""
        session = self._session
        if self._lost:
            state = f"a copy without its {' and '.join(self._lost)}"
        else:
            state = "no backward pass yet" if session is None else f"{session.world_size} ranks"
        return f"<fusedcomm.CommState: wire {self.config.wire}, sum {self.config.sum}, {state}>"

    def _parameters(self) -> list[NamedParameter] | None:
        if self._module is None:
            return None
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        return named_parameters(named_tensors(self._module, ignored), [self.config])

    def __getstate__(self) -> dict:
        # A copy has only the configuration. The engine, the group and the model stay with the original.
        _never_called.pop(self._number, None)  # the copy may be called, perhaps in another process
        state = copy.copy(self.__dict__)
        held = {"process_group": self.process_group, "module": self._module}
        lost = [name for name, value in held.items() if value is not None]
        state.update(process_group=None, _module=None, _session=None, _lost=self._lost + lost)
        return state


def comm_hook(state: CommState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: ``ddp.register_comm_hook(fusedcomm.CommState("bf16"), fusedcomm.comm_hook)``.

    Returns a future of the bucket's buffer (1-D, the bucket's dtype), which then holds the mean over the ranks.

    Raises:
        TypeError: `state` is not a CommState.
        RuntimeError: compiled autograd's python reducer called it. Also as :meth:`CommState.session`.
    """
    if not isinstance(state, CommState):
        raise TypeError(f"fusedcomm.comm_hook needs a fusedcomm.CommState as its state, not {type(state).__name__}")
    if not isinstance(bucket, dist.GradBucket):
        raise RuntimeError(
            f"fusedcomm.comm_hook was given a {type(bucket).__name__}, as compiled autograd's python reducer does: set "
            "torch._dynamo.config.optimize_ddp to something other than 'python_reducer'"
        )
    state.look_at(bucket)
    # From a hook that was registered in Python the reducer accepts only a Python object as the result.
    session = state.session(bucket.buffer().device)
    return _C.run_ddp_bucket(session.synchronizer, bucket).then(_value)


def _value(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    return future.value()


def _watch_first_step() -> None:
    def after_step(*_: object) -> None:
        # The hook stays: torch goes through its hooks here, and raises if one is removed meanwhile.
        global _has_stepped
        _has_stepped = True

    register_optimizer_step_post_hook(after_step)


@atexit.register
def _report_never_called() -> None:
    """Warns once, on rank 0, of CommStates that no hook was called with. It says nothing without an optimizer step, or
    after an error."""
    has_failed = getattr(sys, "last_value", None) is not None
    if not (_never_called and _has_stepped) or has_failed or env.rank() != 0:
        return
    wires = ", ".join(f"CommState({wire!r})" for wire in _never_called.values())
    reasons = []
    if any(name in sys.modules for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")):
        reasons.append(
            "Lightning registers ddp_comm_hook= on CUDA only: use fusedcomm.integrations.lightning.FusedCommCallback"
        )
    if "accelerate" in sys.modules:
        reasons.append(
            "Accelerate's comm_hook= takes only its own hooks: use fusedcomm.integrations.accelerate.attach, or "
            "fusedcomm.integrations.transformers.FusedCommCallback"
        )
    reasons = reasons or [
        "call ddp.register_comm_hook(state, fusedcomm.comm_hook) on the module that trains, or fusedcomm.attach(ddp)"
    ]
    warnings.warn(
        f"fusedcomm: {wires} was made and never called, so these gradients went through DDP's own all-reduce. "
        f"{'. '.join(reasons)}",
        stacklevel=1,
    )
