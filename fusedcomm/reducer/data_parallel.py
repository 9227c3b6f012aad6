"""``fusedcomm.DataParallel``: the surface of DistributedDataParallel on top of a GradReducer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.auto import Auto
from fusedcomm.config import Config, LocalOptions, Search, Wire
from fusedcomm.reducer import replicas
from fusedcomm.reducer.ddp_arguments import check_devices, check_flags, check_module, refuse_given
from fusedcomm.reducer.reducer import GradReducer, release


class DataParallel(nn.Module, Joinable):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``; gradients go through a :class:`GradReducer`.

    ::

        model = fusedcomm.DataParallel(model, wire="bf16")  # was: DistributedDataParallel(model)

    Names in ``state_dict()`` begin with ``module.``, as in DDP, so checkpoints of either load into the other. What has
    gradients, when they are synchronized, and what is broadcast is as in DDP:

    - Construction compares the module's parameters and buffers on all ranks, and gives every rank those of rank 0.
    - A backward pass synchronizes gradients if it is the first after a forward pass outside of :meth:`no_sync`.
      ``backward()`` returns when the gradients are means over the ranks.
    - A forward pass before which gradients were synchronized, and the first one, broadcast rank 0's buffers.
    - Parameters and buffers that ``module._ddp_params_and_buffers_to_ignore`` names are left alone.

    Args:
        module: the model, in its dtype and on its device. Parameters that are frozen now may be thawed later.
        device_ids: None, or for a module on one cuda device a list with that device: inputs are then moved to it.
        output_device: None, or the module's cuda device. Outputs are where the module leaves them.
        dim: 0. DDP does not use it, either.
        broadcast_buffers: whether buffers are broadcast at construction and before forward passes.
        init_sync: whether construction broadcasts parameters and buffers. The ranks are compared in any case.
        process_group: None: the default group.
        bucket_cap_mb: a bucket is complete when it has this many MiB of gradients; the first has 1 MiB if that is less.
            None: 25, or with a search the size that it finds.
        find_unused_parameters: whether a backward pass may leave out parameters; see :class:`GradReducer`.
        check_reduction: accepted with either value, because a missing gradient is always an error.
        gradient_as_bucket_view: accepted with either value. Gradients are sent from where they lie, so the copy that
            this option saves in DDP is never made; they are not views, and ``detach_()`` works.
        static_graph: whether all backward passes use the same parameters. Then some may never be used, as with
            `find_unused_parameters`, at the same cost. Not as in DDP, a parameter must not be used in two checkpoints
            with ``use_reentrant=True``.
        wire: a wire, a :class:`Config`, or a search, as for :class:`GradReducer`. None: ``Config()``.
        local: a :class:`LocalOptions`: options that may differ from rank to rank.
        quiet: whether rank 0 does not report the plan.
        forward_sync_buffers: whether buffers are broadcast before forward passes; construction then always broadcasts
            them. None: as `broadcast_buffers` says.
        mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce, device_mesh,
            skip_all_reduce_unused_params, bucket_cap_mb_list, batched_grad_copy: refused with the reason.

    Attributes:
        module: the model.
        comm: the :class:`GradReducer`: ``stats()``, ``plan()``, ``trace()``, ``state_dict()`` …
        process_group, device_ids, output_device, dim, broadcast_buffers, forward_sync_buffers, broadcast_bucket_size,
            find_unused_parameters, static_graph, gradient_as_bucket_view, parameters_to_ignore: as in DDP.
        require_backward_grad_sync: False within :meth:`no_sync`.

    Raises:
        TypeError: `module` is no module, or is a DistributedDataParallel.
        ValueError: an argument is out of range or cannot apply, or something else synchronizes one of the parameters.
        RuntimeError: no parameter requires a gradient, a parameter is not initialized, or one of the reasons of
            :class:`GradReducer`; if the ranks do not agree, the same text on every rank, with the rank that differs.

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
        wire: Wire | Search | Config | Auto | None = None,
        local: LocalOptions | None = None,
        quiet: bool = False,
        forward_sync_buffers: bool | None = None,
        mixed_precision: object = None,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        refuse_given(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            dim=dim,
        )
        check_flags(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        if process_group is None and not dist.is_initialized():
            raise RuntimeError("fusedcomm.DataParallel needs ranks: call torch.distributed.init_process_group first")
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        self.parameters_to_ignore = replicas.ignored_names(module)
        self._device = check_module(module, self.parameters_to_ignore)
        self.device_ids, self.output_device = check_devices(self._device, device_ids, output_device)
        self.dim, self.module = dim, module
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.forward_sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_bucket_size = replicas.BROADCAST_NBYTES
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._divides_by_active = False
        self._authoritative_rank: int | None = None  # whose parameters all ranks got at the end of join()
        self.comm = GradReducer(
            module,
            wire,
            bucket_mib=bucket_cap_mb,
            process_group=self.process_group,
            find_unused_parameters=find_unused_parameters or static_graph,
            local=local,
            quiet=quiet,
        )
        release(module)  # the hooks end with this object, as those of DDP do
        try:
            self._begin_equal(init_sync, broadcast_buffers or forward_sync_buffers is not None)
        except BaseException:
            self.comm.detach()
            raise
        self.comm._reducer.is_on = False  # until a forward pass

    def _begin_equal(self, init_sync: bool, with_buffers: bool) -> None:
        """Compares the ranks. With `init_sync`, gives them rank 0's parameters, and its buffers if `with_buffers`."""
        options = {
            "init_sync": init_sync,
            "broadcast_buffers": [with_buffers, self.forward_sync_buffers],
            "static_graph": self.static_graph,
        }
        replicas.compare(self.comm._of_original(), self.module, self.parameters_to_ignore, options)
        if init_sync:
            self._broadcast_state(0, with_buffers)

    def _broadcast_state(self, source: int, with_buffers: bool) -> None:
        tensors = replicas.parameters(self.module, self.parameters_to_ignore)
        if with_buffers:
            tensors += replicas.buffers(self.module, self.parameters_to_ignore)
        replicas.broadcast(self.process_group, tensors, source)

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are broadcast before forward passes; another name of `forward_sync_buffers`, as in DDP."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Calls the module, and prepares the synchronization of the backward pass that follows."""
        with torch.autograd.profiler.record_function("fusedcomm.DataParallel.forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            output = self.module(*inputs, **kwargs)
            self._after_forward()
            return output

    @torch.compiler.disable
    def _before_forward(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        Join.notify_join_context(self)
        if self._syncs_buffers():
            source = self._highest_rank(is_candidate=True) if self._join_config.enable else 0
            self._broadcast_buffers(source)
        if self._join_config.enable:
            self._count_active(self._syncs_gradients())
        if self.device_ids:
            moved = _to_kwargs(inputs, kwargs, self._device, True)
            inputs, kwargs = moved[0][0], moved[1][0]
        return inputs, kwargs

    @torch.compiler.disable
    def _after_forward(self) -> None:
        self.require_forward_param_sync = self._syncs_gradients()
        if self.require_forward_param_sync:
            self.comm._reducer.turn_on_once()

    def _syncs_gradients(self) -> bool:
        """Whether the backward pass of a forward pass under way will synchronize gradients."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _syncs_buffers(self) -> bool:
        if not (self.require_forward_param_sync and self.forward_sync_buffers):
            return False
        return bool(replicas.buffers(self.module, self.parameters_to_ignore))

    def _broadcast_buffers(self, source: int) -> None:
        # The module may have replaced buffers since the last pass.
        buffers = replicas.buffers(self.module, self.parameters_to_ignore)
        # As in DDP, a graph of an earlier forward pass may still be used for a backward pass.
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            replicas.broadcast(self.process_group, buffers, source)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients add up on this rank. Enter it on every rank.

        As in DDP the forward pass decides: the block must contain it and ``backward()``. The first forward and backward
        pass after the block synchronize the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context for ranks that have different numbers of inputs; see ``DistributedDataParallel.join``.

        A rank that has reached the end of the block sends zeros in the backward passes of the others. When all have
        reached it, every rank gets the parameters of a rank that was last.

        Args:
            divide_by_initial_world_size: whether such ranks count in the mean, as zeros. If not, the mean is that of
                the other ranks: the mean of all is multiplied when it has arrived, so its last bit may differ from
                DDP's.
            enable: False: the context does nothing.
            throw_on_early_termination: whether the end of one rank's inputs raises RuntimeError on every rank.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: object) -> JoinHook:
        """For ``torch.distributed.algorithms.join.Join``. ``divide_by_initial_world_size``: see :meth:`join`. Other
        keywords are meant for other objects in the same context."""
        self._divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _highest_rank(self, is_candidate: bool) -> int:
        """The highest rank that is a candidate. A collective call."""
        rank = torch.tensor([self.process_group.rank() if is_candidate else -1], dtype=torch.int64, device=self._device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def _count_active(self, syncs: bool) -> int:
        """Returns how many ranks will synchronize gradients in the next backward pass. A collective call."""
        count = torch.tensor([1.0 if syncs else 0.0], dtype=torch.float32, device=self._device)
        dist.all_reduce(count, group=self.process_group)
        num_active = int(count.item())
        if syncs and self._divides_by_active:
            self.comm._reducer.scale_means(self.process_group.size() / num_active)
        return num_active

    # ---- what cannot be

    def register_comm_hook(self, state: object, hook: Callable) -> NoReturn:
        """Raises RuntimeError: a communication hook works on DDP's buckets."""
        raise RuntimeError(
            "fusedcomm.DataParallel takes no communication hooks, because it has no buckets in memory to give them: "
            "DataParallel(module, wire=…) chooses how gradients are sent"
        )

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise TypeError(
            "fusedcomm.DataParallel can be neither copied nor pickled: its process group, threads and connections stay "
            "with the original. Save state_dict(), whose names are those of DDP's; or copy .module, and wrap the copy "
            "in a DataParallel of its own"
        )

    # DDP's way to name parameters and buffers that it shall leave alone, and to list the others.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(DistributedDataParallel._get_data_parallel_params)


class _Shadow(JoinHook):
    """What a rank without inputs does while others train: the counterparts of their collective calls."""

    def __init__(self, model: DataParallel) -> None:
        super().__init__()
        self._model = model

    def main_hook(self) -> None:
        model = self._model
        if model._syncs_buffers():
            model._broadcast_buffers(model._highest_rank(is_candidate=False))
        model.require_forward_param_sync = model._count_active(False) > 0
        if model.require_forward_param_sync:
            model.comm.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        model = self._model
        model.comm._reducer.scale_means(1)
        model._authoritative_rank = model._highest_rank(is_last_joiner)
        model._broadcast_state(model._authoritative_rank, model.forward_sync_buffers)
