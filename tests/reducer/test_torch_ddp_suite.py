"""torch's own tests of DistributedDataParallel, with DataParallel in its place."""

import functools

import pytest
import torch
import torchs_ddp_tests
from ranks import RankError, Ranks

import fusedcomm
from fusedcomm import version

# Other versions have some other tests, and do not skip the same.
of_this_version = pytest.mark.skipif(version.minor(torch.__version__) != "2.13", reason="the table is of torch 2.13")

SKIPS = "torch skips it itself"
GPU = "needs GPUs: on CPUs it fails with DDP, too"
HOOK = "registers a communication hook, which is refused: wire= takes its place"
LOGGING = "reads DDP's logging data; DataParallel has comm.stats()"
REDUCER = "looks into DDP's own Reducer"
MIXED = "mixed_precision, which is refused"
OPTIMIZER = "an optimizer that steps within backward(), which is refused"
TEXT = "expects the text of DDP's errors, which the next forward pass raises; here backward() raises another"
BUFFER_HOOK = "a private function of DDP that replaces the broadcast of buffers"
OTHER = {
    "test_ddp_bucket_cap_mb_list": "bucket_cap_mb_list, which is refused",
    "test_ddp_broadcast_buffers_deprecation_warning": "expects that broadcast_buffers is deprecated; here it is not",
    "test_ddp_device_mesh_initialization": "device_mesh, which is refused",
    "test_ddp_profiling_torch_profiler": "looks for DDP's all-reduce in a profile; a wire sends point to point",
    "test_ddp_sink_noclone": "counts the copies that DDP makes of outputs; DataParallel makes none",
    "test_invalid_static_graph": "expects an error if the graph changes; here parameters may change with static_graph",
    "test_skip_all_reduce_unused_parameters": "skip_all_reduce_unused_params, which is refused",
}
NOT_HERE = {
    SKIPS: [
        "test_DistributedDataParallel_non_default_stream",
        "test_DistributedDataParallel",
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_execution_trace",
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_ddp_model_diff_shape_across_ranks",
        "test_ddp_sync_bn_training_vs_eval",
        "test_ddp_has_finalized",
    ],
    GPU: [
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_ddp_device",
        "test_sync_bn_logged",
    ],
    HOOK: [
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_hook_pickling_powerSGD",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_python_error_logged",
    ],
    LOGGING: [
        "test_ddp_comm_hook_logging",
        "test_ddp_logging_data_cpu",
        "test_ddp_logging_data_gpu",
        "test_static_graph_api_cpu",
        "test_different_graph_across_ranks",
    ],
    REDUCER: [
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_build_debug_param_to_name_mapping_requires_grad",
        "test_detect_ddp_is_actually_static",
        "test_ddp_remove_autograd_hooks",
    ],
    MIXED: [
        "test_ddp_native_mixed_precision_ignored_params",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ],
    OPTIMIZER: [
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
        "test_ddp_apply_optim_in_backward_ignored_params",
    ],
    TEXT: [
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_ddp_multiple_nested_unused_params_error",
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
    ],
    BUFFER_HOOK: [
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_broadcast_buffer_via_hook",
    ],
}
REASONS = {name: reason for reason, names in NOT_HERE.items() for name in names} | OTHER
SLOW = ["test_ddp_uneven_inputs", "test_ddp_compile_static_graph"]
"""Only `pytest --all` runs them: many models in turn, and Inductor's compiler."""
RUN = [name for name in torchs_ddp_tests.names() if name not in REASONS]


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks for this file alone: torch's test helpers change the process that imports them."""
    pool = Ranks(2)
    yield pool
    pool.close()


def data_parallel() -> type:
    """DataParallel with the wire that has DDP's bits."""

    class DataParallel(fusedcomm.DataParallel):
        __init__ = functools.partialmethod(fusedcomm.DataParallel.__init__, wire="fp32", quiet=True)

    return DataParallel


def ddp() -> type:
    return torch.nn.parallel.DistributedDataParallel


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in RUN])
def test_torchs_test_passes(own_ranks, name):
    assert own_ranks.run(torchs_ddp_tests.run, name, data_parallel, world_size=2) == ["passed", "passed"]


@of_this_version
def test_the_table_has_only_tests_that_torch_has():
    known = torchs_ddp_tests.names()
    assert len(known) > 90 and [name for name in REASONS if name not in known] == []
    assert len(RUN) > 35 and not set(RUN) & set(REASONS) and set(SLOW) <= set(RUN)


@of_this_version
@pytest.mark.parametrize("name", NOT_HERE[SKIPS])
def test_torch_skips_what_the_table_says(own_ranks, name):
    for outcome in own_ranks.run(torchs_ddp_tests.run, name, ddp, world_size=2):
        assert outcome.startswith("skipped: ")


@pytest.mark.parametrize("name", NOT_HERE[GPU])
def test_what_needs_a_gpu_fails_with_ddp_too(own_ranks, name):
    with pytest.raises(RankError):
        own_ranks.run(torchs_ddp_tests.run, name, ddp, world_size=2)
