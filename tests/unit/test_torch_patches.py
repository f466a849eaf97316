"""What is replaced in torch is what one table lists, and only one file replaces it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about what this package replaces", allow_module_level=True)

import torch

from fsdp2.common import torch_patches
from fsdp2.common.torch_patches import PATCHES, REGISTERED, VARIABLE, replace

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"
PATHS = [path for patch in PATCHES for path in patch.paths]
# Attributes of others that are set elsewhere, by the last part of the file's path: each with the
# reason why that replaces nothing for good.
SET_ELSEWHERE = {
    ("attention.py", "_cp_options.enable_load_balance"): "within a context",
    ("capture.py", "torch.backends.mkldnn.enabled"): "within a context",
    ("tracing.py", "propagator._propagate_tensor_meta_non_cached"): "within a context",
    ("deterministic.py", "torch.backends.cudnn.benchmark"): "a setting that the caller asks for",
    ("torch_patches.py", "setattr(owner)"): "the one place",
    ("forward_methods.py", "setattr(module)"): "a method of one module",
    ("deepcopy.py", "setattr(memo[id(module)])"): "the same, of its copy",
    ("fill.py", "setattr(module)"): "a tensor of one module",
    ("tensor_subclass.py", "setattr(old)"): "an attribute of one tensor",
    ("activations.py", "setattr(witness)"): "the same",
    ("compiled.py", "setattr(module)"): "an attribute of a graph's module",
    ("compiled.py", "module.forward"): "of one module, within a context",
    ("memory.py", "setattr(storage)"): "a method of one storage",
    ("experts.py", "setattr(owner)"): "a parameter of one module",
}
CHANGES = ("setattr", "delattr")


def outside(tree: ast.Module) -> set[str]:
    """Names in a file that stand for what others own: imported ones, and parts of these."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    bindings = list(bound(tree))
    while more := {n for n, value in bindings if n not in found and is_part(value, found)}:
        found |= more
    return found


def bound(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that are given values, with these: assignments and loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.For) and (
            value := node.iter if isinstance(node, ast.For) else node.value
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, value


def is_part(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is one of ``names``, an attribute of one, or a row of such."""
    if isinstance(value, ast.Tuple | ast.List):
        return any(is_part(each, names) for each in value.elts)
    if isinstance(value, ast.Call):  # a module or a class that is looked up
        called = ast.unparse(value.func)
        if called.endswith(("import_module", "resolve_name")):
            return True
        return called == "getattr" and is_part(value.args[0], names)
    return isinstance(value, ast.Attribute | ast.Name) and root(value) in names


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def changes(tree: ast.Module) -> Iterator[str]:
    """What a file changes that is, or may be, a class or a module of others."""
    theirs = outside(tree)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            own |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func), node.args[0]
            if called.rpartition(".")[2] in CHANGES or called.endswith("__setattr__"):
                if called.startswith("object."):  # of an object: `object` refuses classes
                    continue
                if root(first) not in own - theirs | {"self", "cls"}:
                    yield f"{called}({ast.unparse(first)})"
            elif called.endswith("patch.object") and is_part(first, theirs):
                yield f"{called}({ast.unparse(first)})"
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            attribute = isinstance(target, ast.Attribute) and root(target) in theirs
            item = isinstance(target, ast.Subscript) and is_namespace(target.value, theirs)
            if attribute or item:
                yield ast.unparse(target)


def is_namespace(node: ast.expr, theirs: set[str]) -> bool:
    """Whether it is ``vars(X)`` or ``X.__dict__`` of one of theirs."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return root(node.value) in theirs
    call = isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args
    return bool(call) and root(node.args[0]) in theirs  # type: ignore[union-attr]


def test_nothing_else_replaces_what_others_own() -> None:
    found = {
        (path.name, change)
        for path in PACKAGE.rglob("*.py")
        for change in changes(ast.parse(path.read_text()))
    }
    assert sorted(found - SET_ELSEWHERE.keys()) == []
    assert sorted(SET_ELSEWHERE.keys() - found) == []


@pytest.mark.parametrize(
    ("program", "change"),
    [
        ("import torch\ntorch.optim.Optimizer.step = 1", "torch.optim.Optimizer.step"),
        ("from torch.optim import Optimizer as O\nO.step = 1", "O.step"),
        ("import torch\nvars(torch.autograd)['grad'] = 1", "vars(torch.autograd)['grad']"),
        ("import torch\nfor m in (torch, torch.nn):\n    vars(m)['a'] = 1", "vars(m)['a']"),
        ("import torch\nkind = torch.nn.Module\nkind.a = 1", "kind.a"),
        ("def f(cls):\n    setattr(cls, 'a', 1)", ""),
        ("def f(kind):\n    setattr(kind, 'a', 1)", "setattr(kind)"),
        ("from torch import nn\nsetattr(nn.Module, 'a', 1)", "setattr(nn.Module)"),
        ("from .ours import Kind\nsetattr(Kind, 'a', 1)", ""),
        ("import torch\ndel torch.nn.Module.a", "torch.nn.Module.a"),
        ("from unittest import mock\nimport torch\nmock.patch.object(torch, 'a')",
         "mock.patch.object(torch)"),
        ("import torch\nx = torch.ones(2)\nx.grad = None", ""),
    ],
)  # fmt: skip
def test_replacing_is_found_in_source(program: str, change: str) -> None:
    assert list(changes(ast.parse(program))) == ([change] if change else [])


def test_the_table_names_what_there_is() -> None:
    assert len(set(PATHS)) == len(PATHS)
    for entry in REGISTERED:
        path, _, function = entry.rpartition(".")
        assert f"def {function}(" in (PACKAGE / f"{path.replace('.', '/')}.py").read_text()


def test_what_the_table_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match=r"torch\.nn\.Module\.forward"):
        replace("torch.nn.Module.forward", lambda before: before)
    with pytest.raises(KeyError):
        torch_patches.register(test_what_the_table_lacks_is_refused, lambda: None)


def documented() -> list[str]:
    text = (ROOT / "docs" / "developers" / "patches.md").read_text()
    return [line for line in text.splitlines() if line.startswith("| `")]


def rows() -> list[str]:
    replaced = [
        f"| `{patch.owner}`: {', '.join(f'`{n}`' for n in patch.names)} | {patch.when} | "
        f"{patch.reason} | {patch.cost} | {patch.without} |"
        for patch in PATCHES
    ]
    return replaced + [f"| `{name}` | {reason} |" for name, reason in REGISTERED.items()]


def test_the_documentation_has_the_table() -> None:
    assert documented() == rows()


# -- in a process of its own ---------------------------------------------------------------------

PROGRAM = '''
import functools, hashlib, json, pkgutil, sys, types, warnings
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad  # what the package would import anyway
import torch.distributed.fsdp._fully_shard._fsdp_init
import torch.distributed.tensor._redistribute

def without_hooks(value):  # around a step, which torch puts there
    hooked = type(value) is types.FunctionType and "hooked" in vars(value)
    return value.__wrapped__ if hooked else value

def at(path):
    owner, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    return without_hooks(vars(owner).get(name) or getattr(owner, name, None))

def is_ours(value):
    value = without_hooks(value)
    value = value.func if type(value) is functools.partial else value
    if type(value) is types.FunctionType:
        return value.__globals__.get("__name__", "").startswith("fsdp2.")
    return str(type(value).__module__).startswith("fsdp2.")

def path_of(function):
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}".removeprefix("fsdp2.")

def all_ours():
    """Attributes of torch's modules and classes that are of this package."""
    found = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "torch":
            continue
        for name, value in list(vars(module).items()):
            if is_ours(value):
                found.add(f"{module_name}.{name}")
            elif isinstance(value, type) and value.__module__ == module_name:
                found |= {f"{module_name}.{value.__qualname__}.{n}"
                          for n, v in list(vars(value).items()) if is_ours(v)}
    return found

warnings.filterwarnings("error", "No sharded parameter")
rank, paths, before_import = int(sys.argv[1]), json.loads(sys.argv[2]), {}
for path in paths:
    before_import[path] = at(path)

import fsdp2
from fsdp2 import fully_shard

dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
digest = hashlib.sha256()
for step in range(3):
    loss = model(torch.randn(4, 6)).square().sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    for value in (loss, *(p.to_local() for p in model.parameters())):
        digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
result = {
    "digest": digest.hexdigest(),
    "changed": [path for path in paths if at(path) is not before_import[path]],
    "found": sorted(all_ours()),
    "errors": {},
}

def error_of(name, call):
    try:
        call()
        result["errors"][name] = ""
    except Exception as error:
        result["errors"][name] = f"{type(error).__name__}: {error}"

def requested(*wanted):
    model(torch.ones(2, 6)).sum().backward(inputs=wanted)
    optimizer.step()

built = []

def build_late():
    model(torch.ones(2, 6))
    built.append(torch.optim.SGD(model[0].parameters(), lr=0.1))

def with_whole_state():
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    other = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 6)).sum().backward()
    other.step()
    optimizer.load_state_dict(other.state_dict())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()

error_of("requested", lambda: requested(*model.parameters()))
optimizer.zero_grad()
model(torch.ones(2, 6)).sum().backward()
before = [p.grad.to_local().clone() for p in model.parameters()]
error_of("after another", lambda: requested(*model.parameters()))
result["added"] = any(
    not torch.equal(p.grad.to_local(), grad) for p, grad in zip(model.parameters(), before)
)
optimizer.zero_grad()
for module in (model, model[0], model[2]):
    module.set_reshard_after_forward(False)
error_of("built", build_late)
error_of("stepped", lambda: built and built[0].step())
for module in (model, model[0], model[2]):
    module.reshard()
error_of("prune", lambda: torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5))
error_of("torch", lambda: torch.distributed.fsdp.fully_shard(nn.Sequential(model)))
error_of("state", with_whole_state)
optimizer.zero_grad()

def with_granularity():
    from fsdp2.dtensor.block_shard import block_shard
    block_shard(0, 4)

error_of("blocks", with_granularity)
from fsdp2.dtensor.memory import _honour_record_stream
_honour_record_stream()  # as the first shards on a device do
result["in_the_end"] = sorted(all_ours())
from fsdp2.common import torch_patches
result["registered"] = sorted(torch_patches._registered)
result["hooks"] = sorted(
    path_of(hook)
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"])
    for name, hooks in vars(module).items() if name.startswith("_global_") and "hooks" in name
    for hook in hooks.values() if is_ours(hook)
)

stepping = fsdp2.optim.step_in_backward(
    torch.optim.AdamW(model.parameters(), fused=True), free_gradients=True
)
for _ in range(4):
    model(torch.ones(2, 6)).sum().backward()
    stepping.step()
if rank == 0:
    print(json.dumps(result))
dist.destroy_process_group()
'''


def run(folder: Path, switch: str | None) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if switch is None else {VARIABLE: switch})
    meeting = f"file://{folder}/meeting-{switch}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), json.dumps(PATHS), meeting],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=3 * harness.JOB_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def with_patches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("with"), None)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("without"), "0")


def resolved(paths: list[str]) -> set[str]:
    """Paths by where their owners are defined: a class has several names."""
    names = set()
    for path in paths:
        owner, _, name = path.rpartition(".")
        there = torch_patches.pkgutil.resolve_name(owner)
        is_class = isinstance(there, type)
        home = f"{there.__module__}.{there.__qualname__}" if is_class else there.__name__
        names.add(f"{home}.{name}")
    return names


def test_each_patch_is_there_after_the_call_that_makes_it(with_patches: dict[str, Any]) -> None:
    at_once = [p for patch in PATCHES for p in patch.paths if "granularity" not in patch.when]
    assert with_patches["changed"] == at_once
    assert set(with_patches["found"]) == resolved(at_once)
    assert set(with_patches["in_the_end"]) == resolved(PATHS)  # after `block_shard`


def test_without_patches_torch_is_as_it_was(without: dict[str, Any]) -> None:
    assert (without["changed"], without["found"], without["in_the_end"]) == ([], [], [])


def test_training_is_the_same_without_patches(
    with_patches: dict[str, Any], without: dict[str, Any]
) -> None:
    assert without["digest"] == with_patches["digest"]


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("requested", "", f"UserWarning: No sharded parameter|'0.weight'|{VARIABLE}=0"),
        ("built", "ValueError: SGD was given the gathered form|'0.weight'", ""),
        ("stepped", "", f"ValueError: SGD was given the gathered form|'0.weight'|{VARIABLE}=0"),
        ("prune", "RuntimeError: torch.nn.utils.prune", "RuntimeError: torch.nn.utils.prune"),
        ("torch", "ValueError: torch.distributed.fsdp.fully_shard", "TypeError: Invariant"),
        ("state", "", "RuntimeError: |mixed torch.Tensor and DTensor"),
        ("blocks", "", f"NotImplementedError: shard_granularity|{VARIABLE}=0"),
    ],
)  # fmt: skip
def test_what_a_patch_does_raises_without_it(
    name: str, on: str, off: str, with_patches: dict[str, Any], without: dict[str, Any]
) -> None:
    for result, words in ((with_patches, on), (without, off)):
        error = result["errors"][name]
        assert bool(error) == bool(words), error
        assert all(word in error for word in words.split("|")), error
        assert result is without or VARIABLE not in error


def test_without_patches_requested_gradients_beside_others_are_lost_unnoticed(
    with_patches: dict[str, Any], without: dict[str, Any]
) -> None:
    for result, added in ((with_patches, True), (without, False)):
        assert (result["errors"]["after another"], result["added"]) == ("", added)


def test_what_is_registered_is_listed(
    with_patches: dict[str, Any], without: dict[str, Any]
) -> None:
    both = {
        "api.library_methods._check_registration",
        "api.default_step._count_writes",
        "dtensor.memory._record_stream",
        "guards.optimizer_checks._check_unreduced",
    }
    # Who uses the other three: tests of `core/test_mistakes.py` and of torchao's optimizers.
    assert set(with_patches["registered"]) == both
    assert set(without["registered"]) == both | {"guards.optimizer_checks._check_unpatched"}
    for result in (with_patches, without):  # and torch has no other of ours
        assert set(result["hooks"]) == set(result["registered"]) - {"dtensor.memory._record_stream"}


def test_the_switch_counts_when_something_would_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "torch.optim.Optimizer.zero_grad"
    monkeypatch.setattr(torch_patches, "_replaced", set())
    monkeypatch.setattr(path, before := torch.optim.Optimizer.zero_grad)  # put back in the end
    monkeypatch.setenv(VARIABLE, "0")  # after the import
    replace(path, lambda _: "never")
    assert torch.optim.Optimizer.zero_grad is before
    monkeypatch.delenv(VARIABLE)
    replace(path, lambda _: "first")
    replace(path, lambda _: "second")  # once is enough
    monkeypatch.setenv(VARIABLE, "0")  # too late
    replace(path, lambda _: "third")
    assert torch.optim.Optimizer.zero_grad == "first"
