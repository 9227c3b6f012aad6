"""``fusedcomm.DataParallel``: the surface of DistributedDataParallel on top of a GradReducer."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _sync_module_states, _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from fusedcomm.autotune.auto import ConfigLike
from fusedcomm.config import LocalOptions, check, combinations
from fusedcomm.members.members import Members
from fusedcomm.members.training.passes import Training
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.reducer.ddp_arguments import (
    check_devices,
    check_module,
    group_of,
    has_buffers,
)
from fusedcomm.reducer.parameters import USUAL_BUCKET_MIB, ignored_names, replicas_to_agree
from fusedcomm.reducer.reducer import GradReducer, release
from fusedcomm.session.served import servers_of
from fusedcomm.session.surface import Spelled

_MIB = 1 << 20


class DdpReducer:
    """``model.reducer``: what pipelines and trainers call on DDP's Reducer to prepare a backward pass."""

    def __init__(self, comm: GradReducer) -> None:
        self._comm = comm

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward pass synchronizes gradients. `outputs`: DDP looks for unused parameters from there."""
        self._comm.prepare()

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were cut again: never here: the backward pass does it."""
        return False


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method of DDP that raises RuntimeError with the reason."""

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"fusedcomm.DataParallel has no {name}: {instead}")

    method.__name__, method.__doc__ = name, f"Refused: {instead}."
    return method


class DataParallel(Spelled, DistributedDataParallel):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``; gradients go through a :class:`GradReducer`.

    ::

        model = fusedcomm.DataParallel(model, config="bf16")  # was: DistributedDataParallel(model)

    It is a DistributedDataParallel for ``isinstance``, and shares its methods, but not its reducer: the class's
    ``__init__`` is not called. Names in ``state_dict()`` begin with ``module.``, as in DDP, so checkpoints of either
    load into the other. What has gradients, when they are synchronized, and what is broadcast is as in DDP:

    - Construction compares the module's parameters and buffers on all ranks, and gives every rank those of rank 0.
    - A backward pass through an output of a forward pass outside of :meth:`no_sync` synchronizes gradients.
      ``backward()`` returns when they are means over the ranks. DDP synchronizes only the first backward pass after a
      forward pass, also where several forward passes come first.
    - Outside of :meth:`no_sync` a backward pass that bypasses the wrapper is an error; DDP leaves its gradients alone.
    - A forward pass before which gradients were synchronized, and the first one, broadcast rank 0's buffers.
    - Parameters and buffers that ``module._ddp_params_and_buffers_to_ignore`` names are left alone.
    - A module that is wrapped again belongs to the new wrapper. The old one's forward passes raise then.
    - A copy, made with ``copy`` or ``pickle``, needs the default process group, and makes its reducer in its first
      forward pass with gradients.

    Args:
        module: the model, in its dtype and on its device. Parameters that are frozen now may be thawed later.
        device_ids: None, or for a module on one cuda device a list with that device: inputs are then moved to it.
        output_device: None, or the module's cuda device. Outputs are where the module leaves them.
        dim: 0. DDP does not use it, either.
        broadcast_buffers: whether buffers are broadcast at construction and before forward passes.
        init_sync: whether construction broadcasts parameters and buffers. The ranks are compared in any case.
        process_group: None: the default group.
        bucket_cap_mb: a bucket is complete when it has this many MiB of gradients; the first has 1 MiB if that is less.
            None: 25.
        find_unused_parameters: whether a backward pass may leave out parameters; see :class:`GradReducer`.
        check_reduction: accepted with either value, because a missing gradient is always an error.
        gradient_as_bucket_view: accepted with either value. Gradients are sent from where they lie, so the copy that
            this option saves in DDP is never made; they are not views, and ``detach_()`` works.
        static_graph: whether all backward passes use the same parameters. Then some may never be used, as with
            `find_unused_parameters`, at the same cost. Not as in DDP, a parameter must not be used in two checkpoints
            with ``use_reentrant=True``.
        config: as for :class:`GradReducer`.
        local: a :class:`LocalOptions`: options that may differ from rank to rank.
        quiet: whether rank 0 does not report the plan.
        forward_sync_buffers: whether buffers are broadcast before forward passes; construction then always broadcasts
            them. None: as `broadcast_buffers` says.
        device_mesh: in place of `process_group`: a DeviceMesh with one dimension, whose group is used.
        members: a :class:`fusedcomm.Members`: ranks may be lost and may join while training runs.
        mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce, skip_all_reduce_unused_params,
            bucket_cap_mb_list, batched_grad_copy: refused with the reason.

    Attributes:
        module: the model.
        comm: the :class:`GradReducer`: ``stats()``, ``plan()``, ``trace()``, ``state_dict()`` …
        reducer: what pipelines and trainers call on DDP's; see :class:`DdpReducer`.
        process_group, device_ids, output_device, broadcast_buffers, forward_sync_buffers, broadcast_bucket_size,
            find_unused_parameters, static_graph, parameters_to_ignore: as in DDP.
        require_backward_grad_sync: False within :meth:`no_sync`.

    Raises:
        TypeError: `module` is no module, or is a DistributedDataParallel.
        ValueError: an argument is out of range or cannot apply, or something else synchronizes one of the parameters.
        RuntimeError: no parameter requires a gradient, a parameter is not initialized, `device_mesh` has more than one
            dimension or comes with a `process_group`, or one of the reasons of :class:`GradReducer`; if the ranks do
            not agree, the same text on every rank, with the rank that differs.

    A forward pass raises RuntimeError if parameters were replaced or given another dtype or device since construction.
    ``backward()`` raises RuntimeError as with a :class:`GradReducer`. To go on then, call ``comm.detach()`` and wrap
    ``module`` again, on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        config: ConfigLike | None = None,
        local: LocalOptions | None = None,
        quiet: bool = False,
        forward_sync_buffers: bool | None = None,
        mixed_precision: object = None,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,
        members: Members | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        begins_with_buffers = broadcast_buffers or forward_sync_buffers is not None
        given = {
            "mixed_precision": mixed_precision,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "batched_grad_copy": batched_grad_copy,
            "dim": dim,
            "members": members,
            "process_group": process_group,
            "device_mesh": device_mesh,
            "buffers that are broadcast": bool(broadcast_buffers or forward_sync_buffers) and has_buffers(module),
        }
        combinations.refuse("DataParallel", given)
        check.flag("broadcast_buffers", broadcast_buffers)
        check.flag("init_sync", init_sync)
        check.flag("check_reduction", check_reduction)
        check.flag("gradient_as_bucket_view", gradient_as_bucket_view)
        check.flag("static_graph", static_graph)
        self._joins = members is not None and members.joins is not None
        if members is None:
            self.process_group = group_of(process_group, device_mesh)
        else:
            self.process_group = None if self._joins else dist.group.WORLD
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module, self._devices_given = module, (device_ids, output_device)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.forward_sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._options = {
            "config": config,
            "bucket_mib": USUAL_BUCKET_MIB if bucket_cap_mb is None else bucket_cap_mb,
            "local": local,
            "quiet": quiet,
            "members": members,
        }
        self._to_agree = {
            "init_sync": init_sync,
            "broadcast_buffers": [begins_with_buffers, self.forward_sync_buffers],
            "static_graph": static_graph,
        }
        self._set_what_ddp_has()
        self._make_comm()
        self._assign_modules_buffers()
        try:
            if init_sync and not self._joins:  # a rank that joins has the members' parameters already
                self._begin_equal(begins_with_buffers)
        except BaseException:
            self.comm.detach()
            raise

    def _set_what_ddp_has(self) -> None:
        """Attributes that methods of DDP and trainers read."""
        self.broadcast_bucket_size = 250 * _MIB
        self.logger, self._use_python_reducer = None, False
        self.require_forward_param_sync = self._requires_sync = True
        self._last_was_local = False  # whether the last forward pass with gradients was in no_sync()

    def _make_comm(self) -> None:
        """Makes the reducer. Every rank must call it at the same point."""
        self.comm = GradReducer(
            self.module,
            process_group=None if self._options["members"] else self.process_group,
            find_unused_parameters=self.find_unused_parameters or self.static_graph,
            _also_agree=self._checked,
            **self._options,
        )
        # dynamo splits compiled graphs at so many bytes of gradients, so that sending begins before the graph ends.
        self.bucket_bytes_cap = self.comm.bucket_nbytes
        release(self.module)  # the hooks end with this object, as those of DDP do
        self.reducer = DdpReducer(self.comm)
        self.comm.native.is_on = False  # until a forward pass
        self.comm.serves_as, self.comm.place = "a fusedcomm.DataParallel", "in hosts"
        self._tell_whether_local()

    def _checked(self) -> dict[str, object]:
        """Checks what is wrapped, and takes it over. Returns what all ranks must have equal."""
        self.parameters_to_ignore = ignored_names(self.module)
        self.device = check_module(self.module, self.parameters_to_ignore)
        self.device_ids, self.output_device = check_devices(self.device, *self._devices_given)
        self._take_over()
        return {**self._to_agree, **replicas_to_agree(self.module, self.parameters_to_ignore)}

    def _take_over(self) -> None:
        """Detaches the older wrappers of the module's parameters."""
        for other in servers_of(self.module.parameters()):
            if not isinstance(other, GradReducer) or other.place == "alone":
                continue
            other.detach()
            other.was_taken_over = True
            warn_alone(
                "fusedcomm: the module is wrapped in a DataParallel again while an older one still exists: the older "
                "one was detached, and its forward passes raise from now on",
                stacklevel=5,
            )

    def _begin_equal(self, with_buffers: bool) -> None:
        """Gives all ranks rank 0's parameters, and its buffers if `with_buffers`."""
        ignored = self.parameters_to_ignore
        if isinstance(self.comm.runs, Training):
            names = [name for name, _ in self.module.named_buffers() if not with_buffers or name in ignored]
            self.comm.runs.begin_equal(without=[f"buffer {name}" for name in names])
            return
        self.comm.session.call(
            lambda: _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=ignored,
                broadcast_buffers=with_buffers,
            ),
            "DataParallel(…)",
        )

    @property
    def weight(self) -> float | None:
        """What this rank weighs: ``comm.weight``, see :class:`fusedcomm.Handle`."""
        return self.comm.weight

    @weight.setter
    def weight(self, value: float | torch.Tensor) -> None:
        self.comm.weight = value

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are broadcast before forward passes; another name of `forward_sync_buffers`, as in DDP."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forward passes announce backward passes that are synchronized. False within ``no_sync()``."""
        return self._requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._requires_sync = value
        if not value and self.comm.is_attached:
            self.comm.note_passes()
        self._tell_whether_local()

    def _tell_whether_local(self) -> None:
        if self.comm.is_attached:
            self.comm.native.refuse_local_passes(self._requires_sync and not self._last_was_local)

    # As for DDP's forward(), torch.compile compiles what this function calls.
    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Calls the module, and prepares the synchronization of the backward pass that follows."""
        with torch.autograd.profiler.record_function("fusedcomm.DataParallel.forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            self._after_forward(output)
            return output

    @torch.compiler.disable
    def _before_forward(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if torch.is_grad_enabled():
            self._check_comm()
        if self.will_sync_module_buffers():
            self._sync_buffers()
        if self.device_ids:
            moved = _to_kwargs(inputs, kwargs, self.device, True)
            inputs, kwargs = moved[0][0], moved[1][0]
        return inputs, kwargs

    def _check_comm(self) -> None:
        """Makes a copy's reducer. Raises RuntimeError if gradients would not be synchronized."""
        if self.comm.is_copy:
            self._make_comm()
        elif self.comm.was_taken_over:
            raise RuntimeError(
                "fusedcomm: this DataParallel was detached when its module was wrapped in another one: use the newer "
                "one, or wrap the module again, on every rank"
            )
        elif self.comm.is_attached and (why := self.comm.why_local()):
            self.comm.native.refuse(why)

    @torch.compiler.disable
    def _after_forward(self, output: object) -> None:
        self.require_forward_param_sync = torch.is_grad_enabled() and self._requires_sync
        if not torch.is_grad_enabled() or not self.comm.is_attached:
            return
        if self._last_was_local == self._requires_sync:
            self._last_was_local = not self._requires_sync
            self._tell_whether_local()
        if self._requires_sync:
            self.comm.native.turn_on_once()
            self.comm.native.synchronize_passes_of(list(_find_tensors(output)))

    # ---- copies

    def __getstate__(self) -> dict:
        """As DDP: raises RuntimeError for another group than the default one. With members no group is needed: a copy
        only computes, and refuses gradients."""
        if self._options["members"] is None:
            self._check_default_group()
        return {name: value for name, value in self.__dict__.items() if name != "process_group"}

    def __setstate__(self, state: dict) -> None:
        self.process_group = None if state["_options"]["members"] is not None else group_of(None, None)
        nn.Module.__setstate__(self, state)

    # ---- what cannot be

    register_comm_hook = refused(
        "communication hooks",
        "it keeps no buckets in memory to give them. DataParallel(module, config=…) chooses how gradients are sent",
    )
    _register_builtin_comm_hook = register_comm_hook
    _register_buffer_comm_hook = refused(
        "communication hooks for buffers", "give it broadcast_buffers=False, and send buffers before forward passes"
    )
    join_hook = refused(
        "Join",
        "a rank without data sets model.comm.weight = 0, which needs Config(weighted=…), and runs each forward and "
        "backward pass of the others on any batch",
    )
    _get_ddp_logging_data = refused("logging data", "model.comm.stats() and model.comm.plan() tell what it does")
    _set_static_graph = refused("static graph that is set later", "give DataParallel(module, static_graph=True)")
    _update_process_group = refused("change of the group", "wrap the module again, with the new process_group")
