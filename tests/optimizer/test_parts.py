"""Units: which rank owns which elements of the parameters, and where they lie in its row. No ranks run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.optimizer.parts import ELEMENTWISE, Target, Unit, is_whole, refuse, units

CAP = 1 << 20


def targets_of(shapes, whole=(), wires=None, dtypes=None):
    """Target i has shapes[i]; `whole`: indices of those that one rank owns; `wires`, `dtypes`: by index."""
    return [
        Target(
            name=f"p{i}",
            tensor=torch.zeros(shape, dtype=(dtypes or {}).get(i, torch.float32)),
            wire=(wires or {}).get(i, 0),
            update_wire=(wires or {}).get(i, 0),
            whole=i in whole,
        )
        for i, shape in enumerate(shapes)
    ]


def check(found: list[Unit], targets, num_ranks):
    """Each element of each target has one place in one row of one unit, within its class, and no place two elements."""
    places = {i: torch.zeros(target.tensor.numel(), dtype=torch.int64) for i, target in enumerate(targets)}
    for unit in found:
        taken = torch.zeros(num_ranks, unit.row_numel, dtype=torch.int64)
        ends = torch.tensor([numel for _, _, numel in unit.classes]).cumsum(0).tolist()
        for piece in unit.pieces:
            target = targets[piece.target]
            assert target.tensor.dtype == unit.dtype and 0 <= piece.owner < num_ranks
            places[piece.target][piece.begin : piece.end] += 1
            last = piece.offset + piece.end - piece.begin
            assert last <= unit.row_numel
            taken[piece.owner, piece.offset : last] += 1
            place = next(n for n, end in enumerate(ends) if piece.offset < end)
            assert unit.classes[place][:2] == target.kind and last <= ends[place]
        assert taken.max() <= 1
        assert unit.padding == taken.numel() - taken.sum()
    assert all((counts == 1).all() for counts in places.values())
    assert [unit.last for unit in found] == sorted(unit.last for unit in found)


def owned_numels(found, num_ranks):
    numels = [0] * num_ranks
    for unit in found:
        for piece in unit.pieces:
            numels[piece.owner] += piece.end - piece.begin
    return numels


SHAPES = [(33, 45), (8, 8), (45,), (1,), (5, 7, 3), (), (2,)]
# For each parameter: shape, dtype, wire, whether it is stepped whole, and whether a bucket begins with it.
PARAMETERS = st.tuples(
    st.sampled_from(SHAPES),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 1, -1]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(parameters=st.lists(PARAMETERS, min_size=1), num_ranks=st.integers(1, 7), cap=st.sampled_from([1, 2048, CAP]))
def test_elements_are_owned_once_and_those_of_cut_parameters_in_equal_numbers(parameters, num_ranks, cap):
    shapes, dtypes, wires, are_whole, begins = (dict(enumerate(column)) for column in zip(*parameters, strict=True))
    indices = range(len(shapes))
    whole = [i for i in indices if len(shapes[i]) == 2 and are_whole[i]]
    targets, buckets = targets_of(shapes.values(), whole, wires, dtypes), []
    for i in indices:  # gradients of one dtype are in a bucket
        if not buckets or dtypes[buckets[-1][0]] != dtypes[i] or begins[i]:
            buckets.append([])
        buckets[-1].append(i)
    found = units(buckets, targets, num_ranks, cap)
    check(found, targets, num_ranks)
    for unit in found:
        if targets[unit.targets[0]].whole:
            assert all(targets[i].whole for i in unit.targets)
            continue
        # The elements of each wire are divided by themselves.
        numels = dict.fromkeys((targets[i].kind for i in unit.targets), 0)
        for i in unit.targets:
            numels[targets[i].kind] += targets[i].tensor.numel()
        assert unit.classes == [(*kind, -(-numel // num_ranks)) for kind, numel in numels.items()]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_matrices_are_shared_out_evenly_without_padding(num_ranks):
    targets = targets_of([(8, 16)] * (2 * num_ranks) + [(12, 12)] * num_ranks, whole=range(3 * num_ranks))
    found = units([[i] for i in range(3 * num_ranks)], targets, num_ranks, CAP)
    check(found, targets, num_ranks)
    assert sum(unit.padding for unit in found) == 0
    assert owned_numels(found, num_ranks) == [2 * 128 + 144] * num_ranks
    for unit in found:
        # A unit leaves when the gradient that comes last is there.
        assert unit.last == max(unit.targets)
        for target in unit.targets:
            assert sum(piece.target == target for piece in unit.pieces) == 1


def test_a_unit_of_equal_matrices_ends_at_the_cap():
    targets = targets_of([(8, 16)] * 12, whole=range(12))  # 512 bytes each
    found = units([[i] for i in range(12)], targets, 2, cap=2048)
    check(found, targets, 2)
    assert [len(unit.targets) for unit in found] == [4, 4, 4]
    assert [unit.last for unit in found] == [3, 7, 11]
    found = units([[i] for i in range(12)], targets, 2, cap=1)
    check(found, targets, 2)
    assert [len(unit.targets) for unit in found] == [2] * 6


def test_matrices_of_other_shapes_are_balanced():
    shapes = [(30, 10), (10, 30), (20, 10), (10, 10), (10, 9), (5, 2)]
    targets = targets_of(shapes, whole=range(6))
    found = units([[0, 1, 2], [3, 4, 5]], targets, 2, CAP)
    check(found, targets, 2)
    assert len(found) == 1 and found[0].last == 1
    numels = owned_numels(found, 2)
    assert sum(numels) == 1000 and abs(numels[0] - numels[1]) <= 20


def test_of_as_many_elements_the_costliest_do_not_meet_on_one_rank():
    targets = targets_of([(4, 64), (16, 16), (2, 128), (16, 16)], whole=range(4))
    # The two squares are alike: one for each rank. The others have as many elements.
    found = units([[0, 1, 2, 3]], targets, 2, CAP)
    check(found, targets, 2)
    owner = {piece.target: piece.owner for unit in found for piece in unit.pieces}
    assert owner[1] != owner[3] and owner[0] != owner[2]


# ---- which optimizers own what


class Lion(torch.optim.Optimizer):
    def step(self, closure=None): ...


class Soap(torch.optim.Optimizer):
    def step(self, closure=None): ...


class OwnAdam(torch.optim.AdamW): ...


def test_the_class_says_whether_whole_parameters_are_owned():
    for name in ELEMENTWISE:
        if hasattr(torch.optim, name):
            assert not is_whole(getattr(torch.optim, name), None)
    assert not is_whole(Lion, None)
    for kind in (torch.optim.Muon, torch.optim.Adafactor, Soap):
        assert is_whole(kind, None)
    # What a subclass changes is not known.
    assert is_whole(OwnAdam, None)


def test_the_user_may_say_otherwise():
    assert not is_whole(OwnAdam, False) and is_whole(torch.optim.AdamW, True) and not is_whole(Soap, False)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, dtype=torch.float64), "p1 is torch.float64"),
        (torch.zeros(3, dtype=torch.complex64), "p1 is torch.complex64"),
        (torch.zeros(3, device="meta"), "p1 is on meta and p0 on cpu"),
        (torch.zeros(4, 4)[:, ::2], "p1 has gaps in memory"),
        (torch.zeros(1).expand(4), "p1 has gaps in memory"),
    ],
)
def test_parameters_that_no_owner_can_step_are_refused_by_name(tensor, words):
    (first,) = targets_of([(4, 3)])
    with pytest.raises(ValueError, match=words):
        refuse([first, Target("p1", tensor, 0, 0, False)], lambda _: False)


def test_sparse_gradients_are_refused_by_name():
    targets = targets_of([(4, 3), (5,)])
    with pytest.raises(ValueError, match="p1 has sparse gradients"):
        refuse(targets, lambda tensor: tensor is targets[1].tensor)


def test_dense_parameters_in_any_order_are_taken():
    tensors = [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 5).t(),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(9)[4:],
        torch.zeros(1, 6)[:, 2:4],
    ]
    refuse([Target(str(i), tensor, 0, 0, False) for i, tensor in enumerate(tensors)], lambda _: False)
