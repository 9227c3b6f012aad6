"""The same engine behind PyTorch's usual call, ``ddp.register_comm_hook(state, hook)``.

Use it with trainers that register hooks themselves (Lightning, Accelerate). The engine starts at the first bucket. Each
bucket costs one call from the reducer into Python.
"""

import atexit
import itertools
import sys
import threading
import warnings

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedcomm import env
from fusedcomm.autotune.auto import chosen
from fusedcomm.config import Config, LocalOptions, Wire, combinations, local_options
from fusedcomm.ddp.module import named_tensors, refuse_delayed
from fusedcomm.native import _C
from fusedcomm.session.handle import CommHandle
from fusedcomm.session.parameters import named_parameters
from fusedcomm.session.session import Session
from fusedcomm.session.stats import Stats
from fusedcomm.session.surface import Sealed

# CommStates that no hook has been called with, by number: their wires.
_never_called: dict[int, str] = {}
_numbers = itertools.count()
_has_stepped = threading.Event()  # whether an optimizer has stepped since the first CommState
# The hook stays: torch goes through its hooks at each step, and raises if one is removed meanwhile.
register_optimizer_step_post_hook(lambda *_: _has_stepped.set())


class CommState(Sealed):
    """The state of :func:`comm_hook`: its configuration, and its engine once training has begun. One for each module.

    Args:
        config: a wire's name or a :class:`fusedcomm.Config`; see :func:`fusedcomm.autotune.auto.chosen`.
        local: as for :func:`fusedcomm.attach`.
        process_group: the group that DDP uses. None: the default group. A hook cannot see that DDP's group changes:
            make another DistributedDataParallel and CommState then.
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
        self.process_group, self._module, self._local = process_group, module, local_options(local)
        self._comm: CommHandle | None = None  # what attach() would have returned, from the first bucket on
        self._loaded: dict | None = None  # state to load then
        self._lost = ""  # if this is a copy: arguments that could not be copied
        self._has_seen_a_pass = False  # if so, every parameter has been in a bucket
        self._number = next(_numbers)
        if self._number == 0:
            _has_stepped.clear()
        _never_called[self._number] = self.config.wire
        self._seal()

    def session(self, device: torch.device) -> Session:
        """Returns the running session. The first call, which every rank must make, starts it.

        Args:
            device: where the bucket is; the engine moves gradients on that device.

        Raises: as :class:`Session`; RuntimeError if this object is a copy without its group or module.
        """
        if self._lost:
            raise RuntimeError(f"fusedcomm: this CommState is a copy, which has no {self._lost}: make a new one")
        group = self.process_group or dist.group.WORLD
        if self._comm is None:
            self._comm, self._loaded = self._attached(group, device), None
        elif self._comm.session.process_group is not group:
            raise RuntimeError(
                "fusedcomm: the process group of this CommState is not that of its first bucket, or was made anew: "
                "make another DistributedDataParallel over the new group, with a CommState of its own"
            )
        self._comm.session.say_notices()
        return self._comm.session

    def _attached(self, group: dist.ProcessGroup, device: torch.device) -> CommHandle:
        parameters, problem = None, None
        try:
            if self._module is not None:
                ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
                parameters = named_parameters(named_tensors(self._module, ignored), self.config)
        except (TypeError, ValueError, RuntimeError) as error:  # of this rank's own module
            problem = error
        comm = CommHandle(Session(self.config, group, parameters, self._local, device, problem=problem))
        try:
            if self._loaded is not None:
                comm.load_state_dict(self._loaded)
        except (TypeError, ValueError, RuntimeError) as error:  # of this rank's own state
            problem = error
        comm.session.confirm(problem)
        return comm

    def look_at(self, bucket: dist.GradBucket) -> None:
        """Raises RuntimeError in the first pass for DDP options that a hook without the DDP module cannot support."""
        _never_called.pop(self._number, None)
        if not self._has_seen_a_pass:
            refuse_delayed(bucket.parameters())
            self._has_seen_a_pass = bucket.is_last()

    def state_dict(self, consolidated: bool = False) -> dict:
        """As :meth:`fusedcomm.ddp.handle.Handle.state_dict`. Before the first bucket it returns what was loaded, and
        raises RuntimeError if nothing was."""
        if self._comm is not None:
            return self._comm.state_dict(consolidated)
        if self._loaded is None:
            raise RuntimeError("fusedcomm: call state_dict() of a CommState after the first backward pass")
        return self._loaded

    def load_state_dict(self, state: dict) -> None:
        """As :meth:`fusedcomm.ddp.handle.Handle.load_state_dict`. Before the first bucket it only keeps `state`."""
        if self._comm is None:
            self._loaded = state
        else:
            self._comm.load_state_dict(state)

    def stats(self) -> Stats | None:
        """Counts and times of this rank; None before the first bucket."""
        return None if self._comm is None else self._comm.stats()

    def _described(self) -> str:
        if self._comm is not None:
            return self._comm._described()
        state = f"a copy without its {self._lost}" if self._lost else "no backward pass yet"
        return f"wire {self.config.wire}, sum {self.config.sum}, {state}"

    def __getstate__(self) -> dict:
        # A copy has only the configuration. The engine, the group and the model stay with the original.
        _never_called.pop(self._number, None)  # the copy may be called, perhaps in another process
        held = {"process_group": self.process_group, "module": self._module}
        lost = self._lost or " and ".join(name for name, value in held.items() if value is not None)
        return {**self.__dict__, "process_group": None, "_module": None, "_comm": None, "_lost": lost}


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


@atexit.register
def _report_never_called() -> None:
    """Warns once, on rank 0, of CommStates that no hook was called with. It says nothing without an optimizer step, or
    after an error."""
    has_failed = getattr(sys, "last_value", None) is not None
    if _never_called and _has_stepped.is_set() and not has_failed and env.rank() == 0:
        wires = ", ".join(f"CommState({wire!r})" for wire in _never_called.values())
        warnings.warn(
            f"fusedcomm: {wires} was made and never called, so these gradients went through DDP's own all-reduce: call "
            "ddp.register_comm_hook(state, fusedcomm.comm_hook) on the module that trains, or fusedcomm.attach(ddp). "
            "Lightning registers ddp_comm_hook= on CUDA only: use fusedcomm.integrations.lightning.FusedCommCallback. "
            "Accelerate's comm_hook= takes only its own hooks: use fusedcomm.integrations.accelerate.attach, or "
            "fusedcomm.integrations.transformers.FusedCommCallback",
            stacklevel=1,
        )
