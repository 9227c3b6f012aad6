"""torch's own tests of DistributedDataParallel, with DataParallel in its place, and those of Join, which DataParallel
does not have, with fusedcomm attached.
"""

import functools
import re

import pytest
import torch
import torchs_ddp_tests
from ranks import RankError
from sampling import few

import fusedcomm
import fusedcomm.attaching  # before torch's class is replaced
from fusedcomm import version

pytestmark = pytest.mark.check

# Other versions have some other tests, and do not skip the same.
IS_THIS_VERSION = version.minor(torch.__version__) == "2.13"
of_this_version = pytest.mark.skipif(not IS_THIS_VERSION, reason="the table is of torch 2.13")

NOT_ON_CPU = ["test_ddp_hook_parity_post_localSGD", "test_ddp_hook_pickling_powerSGD"]
"""With DDP the first hangs, too, and the second fails and leaves a file."""
NEITHER = """
torch skips these itself: test_DistributedDataParallel_non_default_stream test_DistributedDataParallel
    test_ddp_profiling_autograd_profiler test_ddp_profiling_execution_trace test_ddp_has_finalized
    test_compute_bucket_assignment_by_size_sparse_error_with_logger test_ddp_model_diff_shape_across_ranks
    test_ddp_sync_bn_training_vs_eval
these need GPUs: test_DistributedDataParallel_SyncBatchNorm test_DistributedDataParallel_SyncBatchNorm_2D_Input
    test_DistributedDataParallel_SyncBatchNorm_Channels_Last test_DistributedDataParallel_SyncBatchNorm_No_Affine
    test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
    test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
    test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
    test_DistributedDataParallel_SyncBatchNorm_half test_ddp_uneven_inputs_stop_iteration_sync_bn test_ddp_device
    test_sync_bn_logged test_ddp_apply_optim_in_backward test_ddp_apply_optim_in_backward_ignored_params
    test_ddp_apply_optim_in_backward_grad_as_bucket_view_false test_ddp_hook_parity_allreduce_process_group
    test_ddp_logging_data_gpu test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
    test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
    test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
    test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
"""
"""The tests that pass neither with DDP nor with DataParallel on CPUs. All others must pass."""
REASONS = """
communication hooks, which are refused: test_accumulate_gradients_no_sync_allreduce_hook
    test_accumulate_gradients_no_sync_allreduce_with_then_hook test_ddp_hook_parity_allreduce
    test_ddp_hook_parity_powerSGD test_ddp_python_error_logged test_ddp_buffer_hook_allreduce
    test_ddp_buffer_hook_allreduce_return_future test_ddp_broadcast_buffer_via_hook
Join, which is refused: test_ddp_grad_div_uneven_inputs test_ddp_join_model_equivalence test_ddp_uneven_inputs
    test_ddp_uneven_input_join_disable test_ddp_uneven_input_exception
    test_ddp_join_respects_forward_sync_buffers_false
DDP's logging data: test_ddp_comm_hook_logging test_ddp_logging_data_cpu test_different_graph_across_ranks
    test_static_graph_api_cpu
DDP's own Reducer is looked into: test_ddp_control_flow_different_across_ranks test_ddp_control_flow_same_across_ranks
    test_detect_ddp_is_actually_static test_ddp_remove_autograd_hooks
arguments that are refused: test_ddp_bucket_cap_mb_list test_ddp_native_mixed_precision_ignored_params
    test_skip_all_reduce_unused_parameters
a missing gradient is an error of backward() with another text: test_ddp_multiple_nested_unused_params_error
    test_ddp_multiple_nested_unused_params_err_ignore_params test_ddp_unused_params_rebuild_buckets_exception
DDP's all-reduce is looked for in a profile, and a wire sends point to point: test_ddp_profiling_torch_profiler
a warning that broadcast_buffers is deprecated, which it is not here: test_ddp_broadcast_buffers_deprecation_warning
an error when a static graph changes, which is allowed here: test_invalid_static_graph
"""
"""The tests that pass with DDP and not with DataParallel, after the reason: it refuses these, or does otherwise."""
LISTED, MAY_SKIP = (re.findall(r"\btest_\w+", text) for text in (REASONS, NEITHER))
NOT_HERE = [*NOT_ON_CPU, *LISTED]
SAMPLE = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_ddp_ignore_params_arg",
    "test_grads_same_across_ranks_with_no_sync",
    "test_undefined_grad_parity_unused_parameters",
    "test_ddp_broadcast_buffer",
    "test_static_graph_multi_forward",
]
"""`make test` runs these, and `pytest --all` the others, too."""
JOIN = [
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_join_model_equivalence",
]
RUN = [name for name in torchs_ddp_tests.names() if name not in NOT_HERE]
MUST_PASS = {*RUN} - {*MAY_SKIP} if IS_THIS_VERSION else {*SAMPLE}


class DataParallel(fusedcomm.DataParallel):
    """With the wire that has DDP's bits."""

    __init__ = functools.partialmethod(fusedcomm.DataParallel.__init__, config="fp32", quiet=True)


def data_parallel() -> type:
    return DataParallel


def attached() -> type:
    class Attached(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.comm = fusedcomm.attach(self, "fp32", quiet=True)

    return Attached


def ddp() -> type:
    return torch.nn.parallel.DistributedDataParallel


@pytest.mark.parametrize("name", few(RUN, *SAMPLE))
def test_torchs_test_passes_where_it_does_with_ddp(torchs_ranks, name):
    if name in MUST_PASS:
        assert torchs_ranks.run(torchs_ddp_tests.run, name, data_parallel, world_size=2) == ["passed", "passed"]
        return
    try:
        outcomes = torchs_ranks.run(torchs_ddp_tests.run, name, data_parallel, world_size=2)
    except RankError:
        with pytest.raises(RankError):
            torchs_ranks.run(torchs_ddp_tests.run, name, ddp, world_size=2)
        pytest.skip("it fails with DDP, too, as what needs GPUs does")
    assert outcomes == torchs_ranks.run(torchs_ddp_tests.run, name, ddp, world_size=2)
    if outcomes != ["passed", "passed"]:
        pytest.skip(f"torch {outcomes[0]}")


@of_this_version
@pytest.mark.parametrize("name", few(JOIN, JOIN[0]))
def test_torchs_test_of_join_passes_with_the_hook(torchs_ranks, name):
    assert torchs_ranks.run(torchs_ddp_tests.run, name, attached, world_size=2) == ["passed", "passed"]


@of_this_version
def test_the_lists_have_only_tests_that_torch_has():
    known = torchs_ddp_tests.names()
    assert len(known) > 90 and [name for name in NOT_HERE if name not in known] == []
    assert len(NOT_HERE) == len(set(NOT_HERE)) and len(LISTED) < 35
    assert len(MUST_PASS) > 40 and {*SAMPLE} <= MUST_PASS and {*MAY_SKIP} <= {*RUN} and len(MAY_SKIP) == 28


@of_this_version
@pytest.mark.full
@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_passes_with_ddp_alone(torchs_ranks, name):
    assert torchs_ranks.run(torchs_ddp_tests.run, name, ddp, world_size=2) == ["passed", "passed"]
    with pytest.raises(RankError):
        torchs_ranks.run(torchs_ddp_tests.run, name, data_parallel, world_size=2)
