"""What fusedcomm cannot take of a DDP module or a process group: refused by name, before a gradient is wrong."""

import pytest
import torch
import torch.distributed as dist
from models import Gradients, error_of, integers, mean_of_integers, synchronize
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

SHAPE = (80, 64)


def under_join(rank, world_size):
    """The error of a search under a Join that divides by the ranks that still have inputs."""
    ddp = DistributedDataParallel(Gradients(SHAPE))
    comm = fusedcomm.attach(ddp, "auto", quiet=True)
    gradients = [integers(rank, SHAPE)]
    with pytest.raises(RuntimeError) as error, Join([ddp], divide_by_initial_world_size=False):
        for _ in range(2 + rank):  # the ranks have different numbers of inputs
            synchronize(ddp, gradients)
    comm.detach()
    comm = fusedcomm.attach(ddp, "fp32", quiet=True)
    with Join([ddp]):
        return str(error.value), torch.equal(synchronize(ddp, gradients)[0], mean_of_integers(world_size, SHAPE))


def test_a_search_under_a_join_that_divides_by_the_ranks_that_are_left_is_refused(ranks):
    for text, is_mean in ranks.run(under_join, world_size=2):
        assert "config='auto' does not go with Join(…, divide_by_initial_world_size=False)" in text
        assert "leave the option out, or name a wire" in text and is_mean


class Wrapped(dist.ProcessGroup):
    """A process group in Python that hands its calls to another one."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def allreduce(self, tensors, options=None):
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self.inner.broadcast(tensors, options)

    def size(self):
        return self.inner.size()

    def getBackendName(self):
        return "wrapped-gloo"


def with_a_comm_state(ddp, group):
    ddp.register_comm_hook(fusedcomm.CommState("int8", process_group=group), fusedcomm.comm_hook)
    synchronize(ddp, [torch.ones(SHAPE)])


FRONT_ENDS = {
    "attach": lambda ddp, group: fusedcomm.attach(ddp, "int8", quiet=True),
    "auto": lambda ddp, group: fusedcomm.attach(ddp, "auto", quiet=True),
    "off": lambda ddp, group: fusedcomm.attach(ddp, "off", quiet=True),
    "CommState": with_a_comm_state,
    "GradReducer": lambda ddp, group: fusedcomm.GradReducer(Gradients(SHAPE), "int8", process_group=group),
    "DataParallel": lambda ddp, group: fusedcomm.DataParallel(Gradients(SHAPE), config="int8", process_group=group),
}


def over(rank, world_size, make_group):
    """Each front end's error over a group that torch.distributed does not know."""
    texts = []
    for front_end in FRONT_ENDS.values():
        group = make_group()
        ddp = DistributedDataParallel(Gradients(SHAPE), process_group=group, init_sync=False)
        if not isinstance(group, Wrapped):
            dist.barrier()  # a slower rank's constructor still uses the group
            dist.destroy_process_group(group)
        texts.append(error_of(RuntimeError, front_end, ddp, group))
    return texts


def written_in_python():
    return Wrapped(dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("make_group", "words"),
    [
        (written_in_python, "is a test_ddp_refusals.Wrapped, which torch.distributed did not make"),
        (dist.new_group, "has been destroyed, or was not made by torch.distributed"),
    ],
    ids=["in Python", "destroyed"],
)
def test_a_group_that_torch_distributed_does_not_know_is_refused_by_every_front_end(ranks, make_group, words):
    for texts in ranks.run(over, make_group, world_size=2):
        assert len(set(texts)) == 1, texts
        assert texts[0].startswith(f"fusedcomm: the process group {words}. fusedcomm connects")
        assert "new_group(), and give that one to DistributedDataParallel, GradReducer, DataParallel" in texts[0]
