"""The ecosystem's convention, ``ddp.register_comm_hook(state, hook)``, over the same engine.

For trainers that register hooks themselves (Lightning, Accelerate). The engine starts at the first bucket; each bucket
costs one call from the reducer into Python.
"""

import copy

import torch
import torch.distributed as dist

from fusedcomm.autotune.auto import Auto
from fusedcomm.config import AUTO, Config, LocalOptions, explains_moved, given, local_options
from fusedcomm.ddp.module import named_tensors, refuse_delayed
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter, named_parameters
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import load_state_dict, state_dict, take_over
from fusedcomm.session.stats import Stats


class CommState:
    """Configuration, and once training has begun the engine, of :func:`comm_hook`. One for each DDP module.

    Args:
        config, wire, local: as for :func:`fusedcomm.attach`, but for a search.
        process_group: the group that DDP uses; None: the default group. After DDP's group has changed, set the
            attribute of this name to the new one: a hook cannot see it.
        module: the model, needed only if `Config.wires` has patterns of names: a hook sees parameters without names.

    Raises:
        ValueError: an argument is out of range, or two cannot go together.
        TypeError: a keyword is of fusedcomm 0.1; names its new place.
    """

    @explains_moved("CommState")
    def __init__(
        self,
        config: Config | None = None,
        *,
        wire: str | None = None,
        local: LocalOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        if wire == AUTO or isinstance(config, Auto):
            raise ValueError(
                "wire='auto' switches between hooks, which a registered hook cannot: use "
                "fusedcomm.attach(ddp, wire='auto') instead of register_comm_hook"
            )
        self.config = given(config, wire)
        if self.config.name_patterns and module is None:
            raise ValueError(
                f"{', '.join(map(repr, self.config.name_patterns))}: wires has patterns of names, and a communication "
                "hook sees no names: pass module=model, or use fusedcomm.attach"
            )
        self.process_group = process_group
        self._module = module
        self._local = local_options(local)
        self._session: Session | None = None
        self._has_seen_a_pass = False  # so that every parameter has been in a bucket
        self._loaded: dict | None = None  # until there is a session
        self._lost: list[str] = []  # of a copy: arguments that could not be copied

    def session(self, device: torch.device) -> Session:
        """The running engine. The first call, and the first after the group has changed, starts it on every rank.

        Args:
            device: where the bucket at hand is; the engine moves gradients on that device.
        """
        if self._lost:
            raise RuntimeError(
                f"this CommState is a copy, and {' and '.join(self._lost)} did not come along: make a new one with the "
                "same arguments"
            )
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        old = self._session
        if old is None or old.process_group is not group:
            parameters, problem = None, None
            try:
                parameters = self._parameters()
            except ValueError as error:  # of this rank, maybe: the others have to know
                problem = error
            self._session = Session(self.config, group, parameters, self._local, device, problem=problem)
            if old is not None:
                take_over(self._session, old)
                old.stop("its CommState moved to another process group")
            elif self._loaded is not None:
                load_state_dict(self._session, self._loaded)
            self._loaded = None
        self._session.say_notices()
        return self._session

    def look_at(self, bucket: dist.GradBucket) -> None:
        """Refuses, in the first pass, what cannot be combined with a hook that sees no DDP module."""
        if not self._has_seen_a_pass:
            refuse_delayed(bucket.parameters())
            self._has_seen_a_pass = bucket.is_last()

    def state_dict(self, consolidated: bool = False) -> dict:
        """As :meth:`fusedcomm.ddp.handle.Handle.state_dict`; RuntimeError before the first bucket."""
        if self._session is None:
            raise RuntimeError("a CommState has no state before the first backward pass")
        return state_dict(self._session, consolidated)

    def load_state_dict(self, state: dict) -> None:
        """As :meth:`fusedcomm.ddp.handle.Handle.load_state_dict`; before the first bucket, it is checked only then."""
        if self._session is None:
            self._loaded = state
        else:
            load_state_dict(self._session, state)

    def stats(self) -> Stats | None:
        """Counts and times of this rank, or None before the first bucket."""
        return None if self._session is None else self._session.stats()

    def _parameters(self) -> list[NamedParameter] | None:
        if self._module is None:
            return None
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        return named_parameters(named_tensors(self._module, ignored), [self.config])

    def __getstate__(self) -> dict:
        # A copy is a configuration; the engine, the group and the model stay with the original.
        state = copy.copy(self.__dict__)
        held = {"process_group": self.process_group, "module": self._module}
        lost = [name for name, value in held.items() if value is not None]
        state.update(process_group=None, _module=None, _session=None, _lost=self._lost + lost)
        return state


def comm_hook(state: CommState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: ``ddp.register_comm_hook(fusedcomm.CommState(wire="bf16"), fusedcomm.comm_hook)``.

    Returns a future of the bucket's buffer (1-D, the bucket's dtype), holding the mean over the ranks.

    Raises:
        TypeError: `state` is not a CommState.
        RuntimeError: called by compiled autograd's python reducer; or as :class:`fusedcomm.session.session.Session`.
    """
    if not isinstance(state, CommState):
        raise TypeError(f"fusedcomm.comm_hook needs a fusedcomm.CommState as its state, not {type(state).__name__}")
    if not isinstance(bucket, dist.GradBucket):
        raise RuntimeError(
            f"fusedcomm.comm_hook was given a {type(bucket).__name__} instead of a GradBucket, as compiled autograd's "
            "python reducer does, which ignores the result: set torch._dynamo.config.optimize_ddp to something other "
            "than 'python_reducer'"
        )
    state.look_at(bucket)
    # The reducer takes nothing but a Python object from a hook that was registered in Python.
    session = state.session(bucket.buffer().device)
    return _C.run_ddp_bucket(session.hook, bucket).then(_value)


def _value(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    return future.value()
