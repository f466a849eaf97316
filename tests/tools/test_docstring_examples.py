"""Every example in a docstring runs: on one rank over gloo, with the names that it takes for given.

An example speaks of a model, a batch, a loss; `given` has them, small. CUDA is the CPU here, and a
mesh of any shape has one rank in each dim, so code for many ranks runs too. What such code prints
on many ranks is not compared (`OTHER_OUTPUT` says why).
"""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: docstrings of its own", allow_module_level=True)

import fsdp2.checkpoint
import fsdp2.experts
import fsdp2.testing

PACKAGE = Path(fsdp2.__file__).parent
PUBLIC = (fsdp2.testing, fsdp2.checkpoint, fsdp2.planning, fsdp2)
# Makes a default group of its own.
WITHOUT_GROUP = {"simulated_mesh"}
# What is called on a model that is not sharded yet, beside what calls a function of these names.
PREDICTS = {
    *("plan", "estimate", "predict", "sweep", "training_cost", "Workload", "Sharding", "Cluster"),
}
SHARDS_ITSELF = {"units_of", "recording", "set_keep_frozen_gathered"} | PREDICTS
# So do these; or they want a model that is not sharded.
SHARDING = ("fully_shard(", "shard_model(", "replicate(", "sweep(")
OTHER_OUTPUT = {
    "check_ranks_agree": "an error of ranks that differ",
    "watch_hangs": "a rank that does not come",
    "watch_ranks": "an error of ranks that differ",
}


def examples() -> dict[str, str]:
    """The docstrings with an example, by module and name."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")

        source = path.read_text()
        if "Example:" not in source:
            continue

        def visit(node: ast.AST, name: str, module: str = module) -> None:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if "Example:" in text:
                    found[f"{module}:{name}"] = text[text.index("Example:") :]
            elif isinstance(node, ast.expr | ast.expr_context):
                return  # most nodes; no definition is below them
            for child in ast.iter_child_nodes(node):
                visit(child, f"{name}.{getattr(child, 'name', '')}".strip("."))

        visit(ast.parse(source), "")
    return found


EXAMPLES = examples()
# Those without a group first: it is made once, for the rest.
IDS = sorted(EXAMPLES, key=lambda i: i.rpartition(".")[2].rpartition(":")[2] not in WITHOUT_GROUP)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sum(0)


class Block(nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.attention, self.mlp, self.experts = nn.Linear(8, 8), nn.Linear(8, 8), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.mlp(self.attention(x)))


class Model(nn.Module):
    """Tokens to logits, with the names that models have in the examples."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def generate(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)


def loss(output: Tensor) -> Tensor:
    return output.float().mean()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return loss(model(tokens))


def one_rank_mesh(kind: str, shape: tuple[int, ...], **options: Any) -> Any:
    return init_device_mesh("cpu", (1,) * len(shape), **options)


def given(source: str, name: str) -> dict[str, Any]:
    """What an example takes for given."""
    torch.manual_seed(0)
    model, tokens = Model(), torch.zeros(2, 4, dtype=torch.long)
    sharded = name not in SHARDS_ITSELF and not any(call in source for call in SHARDING)
    if sharded and name not in WITHOUT_GROUP and dist.is_initialized():
        for block in model.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "dist": dist, "fsdp2": fsdp2, "replace": replace, "Shard": Shard,
        "init_device_mesh": one_rank_mesh, "model": model, "Model": Model, "Llama": Model,
        "Transformer": Model, "LlamaForCausalLM": Model, "Block": Block, "config": None,
        "TransformerBlock": Block, "block": model.blocks[0], "tokens": tokens, "x": tokens,
        "optimizer": optimizer, "loss_of": loss_of, "write": lambda *_: None,
        "start": 1, "steps": 3,
        "bf16": fsdp2.MixedPrecisionPolicy(torch.bfloat16), "build": Model,
        "weight": model.blocks[0].mlp.weight, "orthogonalize": lambda x: x,
        "experts": set(model.blocks[0].experts.parameters()),
        "AutoModelForCausalLM": SimpleNamespace(
            from_pretrained=lambda path: load_file(Path(path) / "model.safetensors")),
    }  # fmt: skip
    names["stage"] = SimpleNamespace(submod=model)
    names["train_step"] = names["train_some_steps"] = lambda: loss_of(model, tokens).backward()
    names["schedule"] = SimpleNamespace(step=lambda x: loss_of(model, x).backward())
    wants_batches = "in batch" in source or "loader" in source
    names["batch"] = [tokens, tokens] if wants_batches else tokens
    names["loader"] = names["batch"]
    names["loss"] = loss if name in PREDICTS | {"compare"} else None
    if name == "share_comm_ctx":
        names["stage_0"], names["stage_1"] = model, fsdp2.fully_shard(Model())
    if "mesh=mesh" in source and dist.is_initialized():
        names["mesh"] = names["expert_mesh"] = one_rank_mesh("cpu", (1,))
    if sharded and dist.is_initialized() and name != "account_gradients":
        loss_of(model, tokens).backward()
        if name == "clip_grad_norm_":
            names["loss"] = loss_of(model, tokens)
    return names


def prepare_files(name: str) -> None:
    """Files that an example reads."""
    if name in ("load_model", "materialize"):
        Path("Llama-3-8B").mkdir()
        save_file(Model().state_dict(), "Llama-3-8B/model.safetensors")
    if name == "peek":
        with fsdp2.checkpoint.Checkpointer("checkpoints") as checkpoints:
            checkpoints.save(3, model=nn.Linear(2, 2), extra={"options": {"lr": 0.1}})
    if name == "load_full_state_dict":
        torch.save(Model().state_dict(), "model.pt")


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)


def run(source: str, names: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """Run ``>>>`` lines one by one, or a block of code; gives what was expected and printed."""
    if ">>>" not in source:
        code = textwrap.dedent(source.partition("::")[2])
        exec(compile(code, name, "exec"), names)
        return
    for example in doctest.DocTestParser().get_examples(source):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(example.source, name, "single"), names)
        yield example.want, printed.getvalue()


# It times this machine for several seconds, as tests/tools/test_measure.py does.
LONG = "fsdp2.planning.hardware.measure:measure"


@pytest.mark.parametrize(
    "where", [pytest.param(i, marks=[pytest.mark.long] * (i == LONG)) for i in IDS]
)
def test_example(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, qualified = where.partition(":")
    name = qualified.rpartition(".")[2]
    if name not in WITHOUT_GROUP:
        request.getfixturevalue("world_of_one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "displayhook", lambda value: value is None or print(repr(value)))
    source = EXAMPLES[where].replace('"cuda"', '"cpu"').replace("run/checkpoints", "checkpoints")
    prepare_files(name)
    public = {n: getattr(m, n) for m in PUBLIC for n in m.__all__}
    own = vars(importlib.import_module(module))
    names = public | own | given(source, name)
    if name in own:
        names[name] = own[name]  # what the example is of
    for want, printed in run(source, names, where):
        if want and name not in OTHER_OUTPUT:
            assert printed.strip() == want.strip()


def test_every_public_function_has_an_example() -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module in (fsdp2, fsdp2.checkpoint, fsdp2.optim, fsdp2.experts, fsdp2.testing)
        for name in module.__all__
        if isfunction(getattr(module, name)) and "Example:" not in getattr(module, name).__doc__
    ]
    assert not missing
