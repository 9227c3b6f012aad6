"""Which parameters a pattern of ``Config.wires`` matches. A tied parameter matches by any of its names."""

import pytest
import torch
from models import refused
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback
from fusedcomm.ddp.module import named_tensors
from fusedcomm.native import _C
from fusedcomm.session.parameters import named_parameters, numbered

SHAPES = ((160, 64), (160, 64), (64, 64))


class LanguageModel(nn.Module):
    """A model whose head and embedding share a weight. Its gradients are prescribed: the shared weight gets the sum of
    the first two, the body gets the third."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(160, 64)
        self.body = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 160, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        weights = (self.embed_tokens.weight, self.lm_head.weight, self.body.weight)
        products = [(weight * gradient).sum() for weight, gradient in zip(weights, gradients, strict=True)]
        return sum(products) + self.body.bias.sum()


def gradients_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def names_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_parameters(remove_duplicate=False))


def trained(rank, world_size, kwargs, through, ignored):
    """Takes a step. Returns the gradients of the tied weight and of the body, and the names of the residuals.
    `ignored`: names that DDP ignores."""
    model = LanguageModel()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    if through == "attach":
        comm = fusedcomm.attach(ddp, Config("int8", feedback=Feedback(), **kwargs), quiet=True)
    else:
        comm = fusedcomm.CommState(Config("int8", feedback=Feedback(), **kwargs), module=model)
        ddp.register_comm_hook(comm, fusedcomm.comm_hook)
    ddp(gradients_of(rank)).backward()
    return model.lm_head.weight.grad, model.body.weight.grad, sorted(comm.state_dict()["residuals"])


@pytest.mark.sampled
@pytest.mark.parametrize("through", ["attach", "CommState"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"wires": {"1d": "fp32", "lm_head.*": "fp32"}},
        {"wires": {"lm_head.*": "fp32"}},
        {"wires": {"1d": "fp32", "embed*": "fp32"}},
    ],
    ids=str,
)
def test_a_tied_weight_travels_as_a_pattern_of_either_name_says(ranks, kwargs, through):
    mine, others = gradients_of(0), gradients_of(1)
    tied, body = (mine[0] + mine[1]) / 2 + (others[0] + others[1]) / 2, (mine[2] + others[2]) / 2
    for tied_grad, body_grad, residuals in ranks.run(trained, kwargs, through, [], world_size=2):
        assert torch.equal(tied_grad, tied)
        assert not torch.equal(body_grad, body)
        torch.testing.assert_close(body_grad, body, atol=0.05, rtol=0)
        assert residuals == ["body.weight"]


@pytest.mark.parametrize("through", ["attach", "CommState"])
def test_state_of_a_tied_weight_goes_by_its_first_name(ranks, through):
    for *_, residuals in ranks.run(trained, {"wires": {"lm_head.*": "bf16"}}, through, [], world_size=2):
        assert residuals == ["body.weight", "embed_tokens.weight"]


@pytest.mark.sampled
@pytest.mark.parametrize("through", ["attach", "CommState"])
@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        (["embed_tokens.weight"], ["body.weight", "embed_tokens.weight"]),
        (["lm_head.weight"], ["body.weight", "embed_tokens.weight"]),
        (["lm_head.weight", "embed_tokens.weight"], ["body.weight"]),
    ],
    ids=str,
)
def test_a_tied_weight_is_ignored_if_ddp_ignores_all_its_names(ranks, through, ignored, names):
    outcome = ranks.run(trained, {}, through, ignored, world_size=2)
    for *_, residuals in outcome:
        assert residuals == names
    assert torch.equal(outcome[0][0], outcome[1][0]) == (len(ignored) == 1)


def test_ddp_knows_a_parameter_of_the_module_itself_by_a_name_that_begins_with_a_dot():
    model = nn.Linear(2, 2)
    assert [name for name, _ in named_tensors(model, {"weight"})] == ["weight", "bias"]
    assert [name for name, _ in named_tensors(model, {".weight"})] == ["bias"]


@pytest.mark.parametrize(
    ("options", "wire"),
    [
        ({"wires": {"lm_head.*": "bf16"}}, "bf16"),
        ({"wires": {"embed*": "bf16", "lm_head.*": "bf16"}}, "bf16"),
        ({"wires": {"lm_head.*": "bf16", "*": "fp16"}}, "bf16"),
        ({"wires": {"embed*": "bf16", "*.weight": "fp16"}}, "bf16"),
        ({"wires": {"1d": "fp16", "lm_head.*": "bf16"}}, "bf16"),
        ({"wires": {"body*": "bf16"}}, "int8"),
        ({"wires": {"lm_head.*": "fp32", "*": "bf16", "1d": "int8"}}, None),
        ({"wires": {"lm_head.*": "fp32", "embed*": "fp32", "1d": "int8"}}, None),
    ],
    ids=str,
)
def test_of_patterns_that_match_a_name_of_a_tied_weight_the_first_counts(options, wire):
    config = Config(wire="int8", **options)
    parameters = named_parameters(names_of(LanguageModel()), [config])
    assert [p.name for p in parameters] == ["embed_tokens.weight", "body.weight", "body.bias"]
    number = _C.EXACT_WIRE if wire is None else config.number_of(wire)
    assert parameters[0].wire == numbered(parameters, config)[0].wire == number


def refused_by_tied(rank, world_size, options):
    return refused(rank, world_size, {"config": Config("int8", **options)}, LanguageModel())


@pytest.mark.parametrize(
    ("options", "of_head", "of_embed"),
    [
        ({"wires": {"lm_head.*": "bf16", "embed*": "int8"}}, "bf16", "int8"),
        ({"wires": {"embed*": "int8", "lm_head.*": "bf16", "*": "fp16"}}, "bf16", "int8"),
        ({"wires": {"embed*": "fp32", "lm_head.*": "bf16", "1d": "int8"}}, "bf16", "fp32"),
        ({"wires": {"lm_head.*": "fp32", "embed*": "int8", "1d": "int8"}}, "fp32", "int8"),
    ],
    ids=str,
)
def test_patterns_that_disagree_over_a_tied_weight_are_refused_with_both_names(ranks, options, of_head, of_embed):
    for error in ranks.run(refused_by_tied, options, world_size=2):
        assert "are one tied parameter, and the patterns disagree over its wire" in error
        assert f"pattern 'lm_head.*' gives 'lm_head.weight' {of_head!r}" in error
        assert f"pattern 'embed*' gives 'embed_tokens.weight' {of_embed!r}" in error


def test_of_three_names_the_two_that_disagree_are_named():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(2, 2, bias=False)})
    model["c"].weight = shared.weight
    config = Config(wire="int8", wires={"b*": "bf16", "c*": "fp16"})
    with pytest.raises(ValueError, match=r"'b.0.weight' and 'c.weight' are one tied parameter"):
        named_parameters(names_of(model), [config])


def test_a_pattern_behind_another_of_the_same_name_has_no_effect_on_a_tied_weight():
    config = Config(wire="int8", wires={"*.weight": "fp16", "lm_head.*": "bf16"})
    with pytest.raises(ValueError, match=r"'lm_head.\*' has no effect: all 1 .* 'embed_tokens.weight' matches"):
        config.check_patterns(names_of(LanguageModel()))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("lm_haed.*", "the closest names are 'lm_head.weight' (tied to 'embed_tokens.weight'), "),
        ("Embed_Token*", "the closest names are 'embed_tokens.weight' (tied to 'lm_head.weight'), "),
        ("blocks.*.nrom.wieght", "the closest names are 'blocks.0.norm.weight', 'blocks.0.norm.bias', "),
    ],
)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_closest_names(wire, pattern, words):
    model = LanguageModel()
    model.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4)}) for _ in range(12))
    config = Config(wire="int8", wires={pattern: wire})
    with pytest.raises(ValueError) as error:
        named_parameters(names_of(model), [config])
    assert f"wires pattern {pattern!r} matches none of the 27 parameters" in str(error.value)
    assert words in str(error.value)
