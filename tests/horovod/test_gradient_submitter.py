"""GradientSubmitter: which gradients are submitted when, and where their results go. Operations are stood in for."""

import gc
import threading
import weakref

import pytest
import torch
from models import Gradients, integers
from torch import nn

from fusedcomm.native import _C

SHAPES = ((4, 5), (3,), (2, 3, 4))


class Job:
    """Stands in for the coordinator: an operation multiplies its tensors by 10, in place, when it is waited for."""

    def __init__(self) -> None:
        self.submissions = []

    def submit(self, submission: "_C.Submission") -> int:
        assert all(tensor.is_contiguous() for tensor in submission.tensors)
        self.submissions.append(submission)
        return len(self.submissions) - 1

    @property
    def names(self) -> list:
        return [submission.names for submission in self.submissions]

    def wait(self, handle: int) -> None:
        for tensor in self.submissions[handle].tensors:
            tensor.mul_(10)


def submitter_of(job: Job, module: nn.Module, groups: list[list[int]] | None = None, **options):
    """groups: of indices; None: every parameter by itself."""
    parameters = [(parameter, name) for name, parameter in module.named_parameters()]
    units = [([i], False) for i in range(len(parameters))] if groups is None else [(group, True) for group in groups]
    return _C.GradientSubmitter(parameters=parameters, units=units, submit=job.submit, **options)


def synchronize(job: Job, submitter) -> None:
    submitter.submit_missing()
    for handle, _ in submitter.take_handles():
        job.wait(handle)
    submitter.write_back()


def gradients(step: int = 0) -> list[torch.Tensor]:
    return [integers(10 * step + i, shape) for i, shape in enumerate(SHAPES)]


@pytest.fixture
def job():
    return Job()


@pytest.fixture
def model():
    return Gradients(*SHAPES)


def assert_tenfold(model: Gradients, expected: list[torch.Tensor]) -> None:
    for weight, gradient in zip(model.weights, expected, strict=True):
        assert torch.equal(weight.grad, 10 * gradient)


# ---- when


def test_each_gradient_is_submitted_once_when_it_is_ready(job, model):
    submitter = submitter_of(job, model, op=1, prescale=0.5, postscale=3.0, set_id=4, wire="int8")
    for step in range(3):
        model.zero_grad()
        model(gradients(step)).backward()
        assert submitter.outstanding() == 3 and submitter.missing() == []
        assert sorted(job.names[3 * step :]) == [["weights.0"], ["weights.1"], ["weights.2"]]
        synchronize(job, submitter)
        assert submitter.outstanding() == 0 and submitter.missing() == [0, 1, 2]
        assert_tenfold(model, gradients(step))
    for each in job.submissions:
        assert (each.op, each.prescale, each.postscale, each.set_id, each.wire) == (1, 0.5, 3.0, 4, "int8")
        assert [each.name] == each.names and not each.is_group


def test_gradients_are_submitted_while_the_backward_pass_goes_on(job):
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    submitter = submitter_of(job, model)
    submitted_before = []
    x = torch.ones(2, 5, requires_grad=True)
    hidden = model[0](x)
    hidden.register_hook(lambda grad: submitted_before.append(job.names.copy()))
    model[1](hidden).sum().backward()
    assert submitted_before == [[["1.weight"]]] and job.names == [["1.weight"], ["0.weight"]]
    assert submitter.outstanding() == 2


def test_passes_add_up_and_the_last_one_submits(job, model):
    submitter = submitter_of(job, model, passes=3)
    for step in range(2):
        model.zero_grad()
        for _ in range(2):
            model(gradients(step)).backward()
            assert submitter.outstanding() == 0
        model(gradients(step)).backward()
        assert submitter.outstanding() == 3
        synchronize(job, submitter)
        assert_tenfold(model, [3 * gradient for gradient in gradients(step)])


def test_one_pass_too_many_is_an_assertion_error(job, model):
    submitter = submitter_of(job, model, passes=2)
    for _ in range(2):
        model(gradients()).backward()
    with pytest.raises(AssertionError, match=r"weights\.\d was computed again after the 2 backward pass\(es\) of this"):
        model(gradients()).backward()
    submitter.reset()
    assert submitter.outstanding() == 0 and submitter.take_handles() == []
    model.zero_grad()
    for _ in range(2):
        model(gradients()).backward()
    synchronize(job, submitter)
    assert_tenfold(model, [2 * gradient for gradient in gradients()])


def test_another_number_of_passes_holds_at_once_and_keeps_what_was_submitted(job, model):
    submitter = submitter_of(job, model)
    model.weights[0].requires_grad_(False)
    model(gradients()).backward()
    model.weights[0].requires_grad_(True)
    assert sorted(job.names) == [["weights.1"], ["weights.2"]]
    submitter.set_passes(2)
    (model.weights[0] * gradients()[0]).sum().backward()
    assert submitter.outstanding() == 2 and submitter.missing() == [0]
    (model.weights[0] * gradients()[0]).sum().backward()
    assert submitter.outstanding() == 3
    for passes in (0, -1):
        with pytest.raises(ValueError, match=f"backward_passes_per_step={passes} is not possible"):
            submitter.set_passes(passes)


def test_unused_parameters_and_unfinished_passes_are_submitted_at_the_end(job, model):
    submitter = submitter_of(job, model, passes=2)
    (model.weights[1] * gradients()[1]).sum().backward()
    assert job.names == [] and submitter.missing() == [0, 1, 2]
    synchronize(job, submitter)
    assert job.names == [["weights.0"], ["weights.1"], ["weights.2"]]
    zeros = [torch.zeros(shape) for shape in SHAPES]
    assert_tenfold(model, [zeros[0], gradients()[1], zeros[2]])


# ---- groups


def test_a_group_is_submitted_when_its_last_gradient_is_ready(job, model):
    submitter = submitter_of(job, model, groups=[[2, 0], [1]])
    (model.weights[0] * gradients()[0]).sum().backward()
    (model.weights[1] * gradients()[1]).sum().backward()
    assert job.names == [["weights.1"]] and submitter.missing() == [0, 2]
    (model.weights[2] * gradients()[2]).sum().backward()
    assert job.names == [["weights.1"], ["weights.2", "weights.0"]]
    assert [each.name for each in job.submissions] == ["weights.1", "weights.2"]
    assert all(each.is_group for each in job.submissions)
    assert submitter.take_handles() == [(0, [1]), (1, [2, 0])]


def test_a_group_that_is_used_in_part_is_submitted_whole(job, model):
    submitter = submitter_of(job, model, groups=[[0, 1, 2]])
    (model.weights[1] * gradients()[1]).sum().backward()
    assert job.names == [] and submitter.missing() == [0, 1, 2]
    synchronize(job, submitter)
    assert job.names == [["weights.0", "weights.1", "weights.2"]]
    assert_tenfold(model, [torch.zeros(SHAPES[0]), gradients()[1], torch.zeros(SHAPES[2])])


@pytest.mark.parametrize(
    ("groups", "text"),
    [([[0, 1]], "weights.2 is in no unit"), ([[0, 1], [1, 2]], "unit 1 has parameter 1"), ([[0, 1, 2, 3]], "3, which")],
)
def test_each_parameter_is_in_one_unit(job, model, groups, text):
    with pytest.raises(ValueError, match=text):
        submitter_of(job, model, groups)


# ---- where gradients lie


def test_gradients_are_summed_where_they_lie(job, model):
    submitter = submitter_of(job, model)
    model(gradients()).backward()
    submitted = {each.name: each.tensors[0].data_ptr() for each in job.submissions}
    assert submitted == {name: weight.grad.data_ptr() for name, weight in model.named_parameters()}
    versions = [weight.grad._version for weight in model.weights]
    synchronize(job, submitter)
    assert all(weight.grad._version > version for weight, version in zip(model.weights, versions, strict=True))


def test_a_gradient_with_its_dimensions_in_another_order_is_not_copied(job):
    model = nn.Conv2d(3, 5, 2, bias=False).to(memory_format=torch.channels_last)
    submitter = submitter_of(job, model)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    gradient = model.weight.grad
    assert gradient.is_contiguous(memory_format=torch.channels_last) and not gradient.is_contiguous()
    (tensor,) = job.submissions[0].tensors
    assert tensor.shape == (5, 2, 2, 3) and tensor.data_ptr() == gradient.data_ptr()
    before = gradient.clone()
    synchronize(job, submitter)
    assert model.weight.grad is gradient and torch.equal(gradient, 10 * before)


def test_memory_that_something_else_uses_keeps_its_values_until_the_results_are_written(job, model):
    flat = torch.zeros(100)
    begin = 0
    for weight in model.weights:
        weight.grad = flat[begin : begin + weight.numel()].view_as(weight)
        begin += weight.numel()
    submitter = submitter_of(job, model)
    model(gradients()).backward()
    submitter.submit_missing()
    ((handle, *_), *others) = submitter.take_handles()
    for each in (handle, *(other for other, _ in others)):
        job.wait(each)
    assert torch.equal(flat[:20], gradients()[0].flatten())
    submitter.write_back()
    assert_tenfold(model, gradients())
    assert torch.equal(flat[:20], 10 * gradients()[0].flatten())


def test_a_sparse_gradient_is_left_to_the_caller(job):
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2, bias=False))
    submitter = submitter_of(job, model)
    model(torch.tensor([1, 5])).sum().backward()
    submitter.submit_missing()
    assert job.names == [["1.weight"]] and submitter.missing() == [0]
    synchronize(job, submitter)
    assert model[0].weight.grad.is_sparse


# ---- threads and ends


def test_hooks_need_no_gil_from_threads_that_wait_for_each_other(job, model):
    """A pass on another thread while this one asks, both through the same lock."""
    submitter = submitter_of(job, model)
    until = threading.Event()

    def train() -> None:
        for step in range(200):
            model.zero_grad()
            model(gradients(step)).backward()
            synchronize(job, submitter)
        until.set()

    thread = threading.Thread(target=train)
    thread.start()
    while not until.is_set():
        submitter.outstanding()
        submitter.missing()
    thread.join()
    assert len(job.submissions) == 600


def test_an_error_of_a_submission_ends_the_backward_pass(model):
    def refuse(submission):
        raise ValueError(f"no more {submission.name}")

    parameters = [(parameter, name) for name, parameter in model.named_parameters()]
    submitter = _C.GradientSubmitter(parameters=parameters, units=[([0, 1, 2], True)], submit=refuse)
    with pytest.raises(Exception, match=r"no more weights\.0"):
        model(gradients()).backward()
    submitter.reset()
    submitter.detach()
    model(gradients()).backward()


def test_after_detach_gradients_stay_on_this_rank(job, model):
    submitter = submitter_of(job, model)
    submitter.detach()
    submitter.detach()
    model(gradients()).backward()
    assert job.names == []


def test_hooks_end_with_their_object(model):
    job = Job()
    submitter_of(job, model)
    ended = weakref.ref(job)
    del job
    gc.collect()
    model(gradients()).backward()
    assert ended() is None
