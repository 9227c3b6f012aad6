"""Which parameters a pattern of ``Config.wires`` matches. A tied parameter matches by any of its names."""

import pytest
import torch
from models import error_of
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


# ---- real ranks

HEAD, EMBED, BODY = "lm_head.weight", "embed_tokens.weight", "body.weight"
# Patterns, names that DDP ignores, and the parameters with residuals.
TRAINED = [
    ({"1d": "fp32", "lm_head.*": "fp32"}, [], [BODY]),
    ({"lm_head.*": "fp32"}, [], [BODY]),
    ({"1d": "fp32", "embed*": "fp32"}, [], [BODY]),
    ({"lm_head.*": "bf16"}, [], [BODY, EMBED]),
    ({}, [EMBED], [BODY, EMBED]),
    ({}, [HEAD], [BODY, EMBED]),
    ({}, [HEAD, EMBED], [BODY]),
]


def trained(rank, world_size, through):
    """Takes a step of each of TRAINED. Returns the gradients of the tied weight and of the body, and the names of the
    residuals."""
    found = []
    for wires, ignored, _ in TRAINED:
        model = LanguageModel()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        ddp, config = DistributedDataParallel(model), Config("int8", feedback=Feedback(), wires=wires)
        if through == "attach":
            comm = fusedcomm.attach(ddp, config, quiet=True)
        else:
            comm = fusedcomm.CommState(config, module=model)
            ddp.register_comm_hook(comm, fusedcomm.comm_hook)
        ddp(gradients_of(rank)).backward()
        found.append((model.lm_head.weight.grad, model.body.weight.grad, sorted(comm.state_dict()["residuals"])))
    return found


@pytest.mark.parametrize("through", ["attach", "CommState"])
def test_a_tied_weight_travels_as_a_pattern_of_either_name_says_and_is_ignored_if_both_are(ranks, subtests, through):
    mine, others = gradients_of(0), gradients_of(1)
    tied, body = (mine[0] + mine[1]) / 2 + (others[0] + others[1]) / 2, (mine[2] + others[2]) / 2
    for case, first, second in zip(TRAINED, *ranks.run(trained, through, world_size=2), strict=True):
        with subtests.test(case=str(case)):
            _, ignored, names = case
            assert torch.equal(first[0], second[0]) == (len(ignored) < 2)
            for tied_grad, body_grad, residuals in (first, second):
                assert residuals == names
                assert torch.equal(tied_grad, tied) == (EMBED not in names and len(ignored) < 2)
                assert not torch.equal(body_grad, body)
                torch.testing.assert_close(body_grad, body, atol=0.05, rtol=0)


# ---- names


def test_ddp_knows_a_parameter_of_the_module_itself_by_a_name_that_begins_with_a_dot():
    model = nn.Linear(2, 2)
    assert [name for name, _ in named_tensors(model, {"weight"})] == ["weight", "bias"]
    assert [name for name, _ in named_tensors(model, {".weight"})] == ["bias"]


LAYER = nn.ModuleDict({"head": nn.Linear(4, 2)})


@pytest.mark.parametrize(
    ("model", "wires", "expected"),
    [
        (LanguageModel(), {"lm_head.*": "bf16"}, ["bf16"]),
        (LanguageModel(), {"embed*": "bf16", "lm_head.*": "bf16"}, ["bf16"]),
        (LanguageModel(), {"lm_head.*": "bf16", "*": "fp16"}, ["bf16"]),
        (LanguageModel(), {"embed*": "bf16", "*.weight": "fp16"}, ["bf16"]),
        (LanguageModel(), {"1d": "fp16", "lm_head.*": "bf16"}, ["bf16"]),
        (LanguageModel(), {"body*": "bf16"}, ["int8"]),
        (LanguageModel(), {"lm_head.*": "fp32", "*": "bf16", "1d": "int8"}, ["fp32"]),
        (LanguageModel(), {"lm_head.*": "fp32", "embed*": "fp32", "1d": "int8"}, ["fp32"]),
        # Not refused: patterns that give what is given already, or all that is left.
        (LAYER, {"head.*": "bf16"}, ["bf16", "fp32"]),
        (LAYER, {"*.bias": "fp32"}, ["int8", "fp32"]),
        (LAYER, {"head.bias": "bf16", "*.bias": "bf16", "1d": "int8"}, ["int8", "bf16"]),
        (LAYER, {"*.weight": "bf16", "*.bias": "fp16", "*": "fp8", "1d": "int8"}, ["bf16", "fp16"]),
        (LAYER, {"*.bias": "fp32", "*.weight": "bf16", "1d": "fp32"}, ["bf16", "fp32"]),
        (nn.Linear(4, 2, bias=False), {"1d": "bf16"}, ["int8"]),  # "1d" may match no parameter
    ],
    ids=str,
)
def test_of_patterns_that_match_a_name_the_first_counts(model, wires, expected):
    config = Config(wire="int8", wires=wires)
    parameters = named_parameters(names_of(model), config)
    assert [p.name for p in parameters] == [name for name, _ in model.named_parameters()]
    numbers = [_C.EXACT_WIRE if wire == "fp32" else config.number_of(wire) for wire in expected]
    for found in (parameters, numbered(parameters, config)):
        assert [p.wire for p in found[: len(expected)]] == numbers


def of_three_names():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(2, 2, bias=False)})
    model["c"].weight = shared.weight
    return model


def deep():
    model = LanguageModel()
    model.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4)}) for _ in range(12))
    return model


def disagree(of_head, of_embed):
    return [
        "are one tied parameter, and the patterns disagree over its wire",
        f"pattern 'lm_head.*' gives 'lm_head.weight' {of_head!r}",
        f"pattern 'embed*' gives 'embed_tokens.weight' {of_embed!r}",
    ]


MATCHES_NONE = "matches none of the 27 parameters"


@pytest.mark.parametrize(
    ("model", "wires", "words"),
    [
        (LanguageModel(), {"lm_head.*": "bf16", "embed*": "int8"}, disagree("bf16", "int8")),
        (LanguageModel(), {"embed*": "int8", "lm_head.*": "bf16", "*": "fp16"}, disagree("bf16", "int8")),
        (LanguageModel(), {"embed*": "fp32", "lm_head.*": "bf16", "1d": "int8"}, disagree("bf16", "fp32")),
        (LanguageModel(), {"lm_head.*": "fp32", "embed*": "int8", "1d": "int8"}, disagree("fp32", "int8")),
        (of_three_names(), {"b*": "bf16", "c*": "fp16"}, ["'b.0.weight' and 'c.weight' are one tied parameter"]),
        (
            LanguageModel(),
            {"*.weight": "fp16", "lm_head.*": "bf16"},
            ["'lm_head.*' has no effect: all 1 ", "as 'embed_tokens.weight' the "],
        ),
        (deep(), {"lm_haed.*": "fp32"}, [MATCHES_NONE, f"the closest names are '{HEAD}' (tied to '{EMBED}'), "]),
        (deep(), {"Embed_Token*": "bf16"}, [MATCHES_NONE, f"the closest names are '{EMBED}' (tied to '{HEAD}'), "]),
        (
            deep(),
            {"blocks.*.nrom.wieght": "bf16"},
            [MATCHES_NONE, "the closest names are 'blocks.0.norm.weight', 'blocks.0.norm.bias', "],
        ),
    ],
    ids=lambda value: "" if isinstance(value, nn.Module) else str(value)[:80],
)
def test_patterns_that_disagree_have_no_effect_or_match_nothing_are_refused_with_names(model, wires, words):
    text = error_of(ValueError, named_parameters, names_of(model), Config(wire="int8", wires=wires))
    assert [each for each in words if each not in text] == []
