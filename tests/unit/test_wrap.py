"""Which modules become units. Nothing here is sharded, and nothing communicates."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import harness

pytestmark = harness.ours_only("wrap policies")

if not harness.RUNS_ON_TORCH:
    from fsdp2.wrap import by_class, by_function, by_name, by_size, units_of


def layers(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(8, 8) for name in names})


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.mixer = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))


class Language(nn.Module):
    def __init__(self, *, tied: bool = False, blocks: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = blocks or nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Experts(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.mixer = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(num))


class Stage(nn.Module):
    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num))
        self.merge = nn.Linear(dim, dim)


class Stages(nn.Module):
    """Networks whose resolution falls from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.stages = nn.ModuleList([Stage(8, 2), Stage(16, 4)])
        self.head = nn.Linear(16, 8)


def names(model: nn.Module, wrap: object = "auto") -> list[str]:
    return [unit.name for unit in units_of(model, wrap)]


# -- units and their parameters -------------------------------------------------------------------


def test_every_parameter_is_in_one_unit_and_inner_units_come_first() -> None:
    model = Language()
    units = units_of(model, [Block, "layers.*.mlp", "embedding", ("norm", "head")])
    assert [unit.name for unit in units] == [
        "embedding",
        "layers.0.mlp",
        "layers.0",
        "layers.1.mlp",
        "layers.1",
        "layers.2.mlp",
        "layers.2",
        "norm, head",
        "(root)",
    ]
    assert units[1].params == tuple(
        f"layers.0.mlp.{i}.{k}" for i in "02" for k in ("weight", "bias")
    )
    assert units[2].params == ("layers.0.mixer.weight", "layers.0.mixer.bias")
    assert units[7].params == ("norm.weight", "norm.bias", "head.weight")
    assert units[8].params == ()
    assert [unit.is_root for unit in units] == [False] * 8 + [True]
    assert sorted(p for u in units for p in u.params) == sorted(dict(model.named_parameters()))


def test_the_model_is_not_changed_and_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = Language(tied=True)
    before = [(name, id(m), type(m)) for name, m in model.named_modules()]
    params = [(name, id(p)) for name, p in model.named_parameters()]
    units_of(model)
    assert [(name, id(m), type(m)) for name, m in model.named_modules()] == before
    assert [(name, id(p)) for name, p in model.named_parameters()] == params


def test_tied_parameters_are_with_the_innermost_unit_that_has_all_their_modules() -> None:
    model = Language(tied=True)
    units = {unit.name: unit for unit in units_of(model, ["embedding", ("norm", "head")])}
    assert "embedding" not in units, "it has nothing left of its own"
    assert units["norm, head"].params == ("norm.weight", "norm.bias")
    assert "embedding.weight" in units["(root)"].params
    together = units_of(model, [("embedding", "norm", "head")])
    assert together[0].params == ("embedding.weight", "norm.weight", "norm.bias")

    nested = nn.ModuleDict({"a": layers("x", "y", "z"), "b": layers("u")})
    tied = nested.get_submodule("a.x").weight
    nested.get_submodule("a.y").weight = tied
    inner = nn.Sequential(nested)
    found = {u.name: u.params for u in units_of(inner, by_name("0.a.x", "0.a.y", "0.b.u"))}
    assert found["0.a.x"] == ("0.a.x.bias",)
    assert "0.a.x.weight" in found["(root)"]


def test_a_module_that_two_units_use_has_to_be_a_unit_itself() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared))
    with pytest.raises(
        ValueError, match=r"Module '0\.0' is part of two units, 0 and 1: make it a unit by"
    ):
        units_of(model, ["0", "1"])
    with pytest.raises(ValueError, match=r"two units, 0 and \(root\)"):
        units_of(model, "0")
    assert names(model, ["0", "1", "0.0"]) == ["0.0", "(root)"]


def test_ignored_parameters_are_in_no_unit() -> None:
    model = Language()
    units = units_of(model, "root", ignored_params={model.head.weight})
    assert "head.weight" not in units[0].params
    assert len(units[0].params) == len(list(model.parameters())) - 1


# -- policies --------------------------------------------------------------------------------------


def test_by_class() -> None:
    model = Language()
    expected = ["layers.0", "layers.1", "layers.2", "(root)"]
    for wrap in (Block, by_class(Block), by_class("Block"), [Block]):
        assert names(model, wrap) == expected
    assert names(model, by_class(nn.Embedding, "LayerNorm")) == ["embedding", "norm", "(root)"]
    with pytest.raises(ValueError, match=r"of class Conv2d; its blocks are of class Block$"):
        units_of(model, by_class(nn.Conv2d))
    with pytest.raises(ValueError, match=r"no module of class Blok: did you mean 'Block'\?$"):
        units_of(model, "class:Blok")
    with pytest.raises(TypeError, match=r"subclasses of nn\.Module or their names, got 3"):
        by_class(3)  # type: ignore[arg-type]


def test_by_name() -> None:
    model = Language()
    assert names(model, "layers.*") == ["layers.0", "layers.1", "layers.2", "(root)"]
    assert names(model, "layers.[02].mlp") == ["layers.0.mlp", "layers.2.mlp", "(root)"]
    assert names(model, ["head", ("embedding", "norm")]) == ["embedding, norm", "head", "(root)"]
    assert names(model, by_name(("layers.*",))) == ["layers.0, layers.1, layers.2", "(root)"]
    with pytest.raises(ValueError, match=r"No module is named 'blocks\.\*'; the model has 'embed"):
        units_of(model, "blocks.*")
    with pytest.raises(ValueError, match=r': for a class, wrap=Block or wrap="class:Block"$'):
        units_of(model, "Block")


def test_by_function() -> None:
    model = Language()
    wrap = by_function(lambda name, module: name.endswith(".mlp"))
    assert names(model, wrap) == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "(root)"]
    assert names(model, lambda model: ["head", ["norm", "embedding"]]) == [
        "norm, embedding",
        "head",
        "(root)",
    ]


def test_policies_that_do_not_fit_the_model() -> None:
    model = Language()
    with pytest.raises(ValueError, match=r"'layers' is a ModuleList, .* \('layers\.\*'\)"):
        units_of(model, "layers")
    with pytest.raises(ValueError, match="Module 'norm' is in two units"):
        units_of(model, ["norm", ("norm", "head")])
    with pytest.raises(ValueError, match="named the module 'nope', which does not exist"):
        units_of(model, lambda model: ["nope"])
    with pytest.raises(TypeError, match="wrap must be 'auto'"):
        units_of(model, 3)


@pytest.mark.parametrize("least", [1, 60, 100, 150, 200, 300, 1000])
def test_by_size_is_the_rule_of_the_first_fsdp(least: int) -> None:
    from torch.distributed.fsdp import wrap as torch_wrap

    wrapped: list[nn.Module] = []

    class Note(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            wrapped.append(module)
            self.module = module

    model = nn.Sequential(Language(), Stages(), nn.Linear(8, 8))
    expected = {module: name for name, module in model.named_modules()}
    chosen = names(model, by_size(least))
    in_bytes = names(model, by_size(min_bytes=4 * least))
    torch_wrap._recursive_wrap(
        model,
        partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=least),
        Note,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    assert chosen == [expected[module] for module in wrapped] + ["(root)"]
    assert in_bytes == chosen


def test_attention_is_not_cut_by_size() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert names(model, by_size(30)) == ["0", "1", "(root)"]
    for bad in ({}, {"min_numel": 0}, {"min_numel": 1, "min_bytes": 1}):
        with pytest.raises(ValueError, match="by_size needs one of"):
            by_size(**bad)


# -- auto ------------------------------------------------------------------------------------------


def test_auto_finds_blocks_embedding_and_head() -> None:
    blocks = ["layers.0", "layers.1", "layers.2"]
    assert names(Language()) == ["embedding", *blocks, "norm, head", "(root)"]
    whole = nn.ModuleDict({"body": Language(), "out": nn.Linear(8, 8)})
    model = nn.Sequential(whole)
    assert names(model) == [
        "0.body.embedding",
        *(f"0.body.{name}" for name in blocks),
        "0.body.norm, 0.body.head, 0.out",
        "(root)",
    ]


def test_auto_leaves_tied_embeddings_to_the_root() -> None:
    units = units_of(Language(tied=True))
    assert "embedding.weight" in units[-1].params
    assert "layers.1" in [unit.name for unit in units]


def test_auto_does_not_take_experts_apart() -> None:
    """Ranks choose different experts, and a unit of its own would wait for all ranks."""
    blocks = nn.ModuleList([Experts(1), Experts(4), Experts(4)])
    assert names(Language(blocks=blocks))[1:4] == ["layers.0", "layers.1", "layers.2"]


def test_auto_takes_the_blocks_of_stages() -> None:
    expected = [f"stages.{i}.blocks.{j}" for i, num in ((0, 2), (1, 4)) for j in range(num)]
    found = names(Stages())
    assert [name for name in found if "blocks" in name] == expected
    assert "stages.0" not in found
    assert "head" in found[-2]


def test_auto_takes_nested_sequentials() -> None:
    def stage(inputs: int, outputs: int) -> nn.Sequential:
        first = nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs))
        second = nn.Sequential(nn.Conv2d(outputs, outputs, 3), nn.BatchNorm2d(outputs))
        return nn.Sequential(first, second)

    model = nn.Sequential(stage(3, 16), stage(16, 16), nn.Flatten(), nn.Linear(16, 100))
    assert names(model) == ["0.0", "0.1", "1.0", "1.1", "3", "(root)"]


def test_auto_by_bytes() -> None:
    """What is small stays with the root, what is larger than any block is a unit of its own."""
    model = nn.ModuleDict(
        {
            "tower": nn.ModuleDict({"proj": nn.Linear(64, 64)}),
            "small": nn.Linear(2, 2),
            "layers": nn.ModuleList(Block() for _ in range(2)),
            "scale": nn.LayerNorm(1),
        }
    )
    assert names(nn.Sequential(model)) == [
        "0.tower.proj",
        "0.layers.0",
        "0.layers.1",
        "(root)",
    ]
    tables = nn.ModuleList(nn.EmbeddingBag(num, 8) for num in (2, 1000, 3, 2000))
    recommender = nn.ModuleDict({"tables": tables, "top": nn.Linear(8, 1)})
    assert names(nn.Sequential(recommender)) == ["0.tables.1", "0.tables.3", "(root)"]


def test_auto_units_are_not_smaller_than_a_mebibyte_in_large_models() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10**6, 64), *(nn.Linear(512, 511) for _ in range(2)))
        assert names(model) == ["0", "(root)"]
        model = nn.Sequential(nn.Embedding(10**6, 64), *(nn.Linear(512, 512) for _ in range(2)))
        assert names(model) == ["0", "1", "2", "(root)"]
