"""The private names of torch that the package uses are those that `torch_private` lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about the source of this package", allow_module_level=True)

from fsdp2.common import torch_private, versions

PACKAGE = Path(__file__).parents[2] / "fsdp2"
LISTED = {entry.name.replace("()", "") for entry in torch_private.NAMES}
LAST_PARTS = {name.rpartition(".")[2] for name in LISTED}
# Python's own, with a leading underscore.
PYTHONS = {"_current_frames", "_exit", "_fields", "_getframe", "_replace"}
# Names that the oldest supported torch lacks, and since when torch has them.
NEW = {
    "torch.Tensor._has_grad_dtype_override": "2.15",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl": "2.15",
}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
# What attributes with names of ours too might be.
TORCH_CLASSES = (
    torch.Tensor, torch.UntypedStorage, DTensor, DeviceMesh, nn.Module, torch.optim.Optimizer,
    dist.ProcessGroup,
)  # fmt: skip


def is_private(part: str) -> bool:
    """Whether a part of a path is private, and not a mark of ours on objects of others."""
    ours = part.startswith("_fsdp2_")
    return part.startswith("_") and not part.endswith("__") and part.strip("_") != "" and not ours


@cache
def torch_attributes() -> set[str]:
    instances = {name for name in vars(nn.Module()) if is_private(name)}
    return instances | {n for kind in TORCH_CLASSES for n in dir(kind) if is_private(n)}


def bound(target: ast.expr) -> Iterator[str]:
    """Names and attributes of ``self`` that an assignment to ``target`` makes."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr


def defined(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, variables, attributes, slots, and the
    keys of dicts, of which classes are made."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(name for target in node.targets for name in bound(target))
            if any(ast.unparse(target) == "__slots__" for target in node.targets):
                constants = (n for n in ast.walk(node.value) if isinstance(n, ast.Constant))
                names.update(str(constant.value) for constant in constants)
        elif isinstance(node, ast.AnnAssign):
            names.update(bound(node.target))
        elif isinstance(node, ast.Dict):
            names.update(key.value for key in node.keys if isinstance(key, ast.Constant))
    return {name for name in names if isinstance(name, str) and is_private(name)}


def imports(tree: ast.Module) -> dict[str, str]:
    """What names of torch are called in a file: {"dist": "torch.distributed"}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def used(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and private names of torch that a file uses: paths, or ``.attribute`` of an object."""
    names = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if path.split(".")[0] == "torch" and any(map(is_private, path.split("."))):
                    yield node.lineno, path
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch" and "._" in alias.name:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            first, _, rest = path.partition(".")
            if first in names and path.replace(".", "").isidentifier():
                full = f"{names[first]}.{rest}"
                owner = full.split(".")[-2]
                if not any(map(is_private, full.split("."))):
                    continue
                yield node.lineno, f".{node.attr}" if owner[:1].isupper() else full
            elif is_private(node.attr) and is_torchs(node, own):
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            for text in (a.value for a in node.args if isinstance(a, ast.Constant)):
                if isinstance(text, str) and is_private(text) and text not in {*own, *PYTHONS}:
                    yield node.lineno, f".{text}"


def is_torchs(node: ast.Attribute, own: set[str]) -> bool:
    """Whether an attribute is torch's and not ours: no file defines it, or torch has it as well and
    it is not looked up in ``self``."""
    if node.attr not in own:
        return node.attr not in PYTHONS
    return node.attr in torch_attributes() and ast.unparse(node.value) not in ("self", "cls")


def unlisted(tree: ast.Module, own: set[str]) -> list[tuple[int, str]]:
    return [(line, name) for line, name in used(tree, own) if not is_listed(name)]


def is_listed(name: str) -> bool:
    """Whether the name is in the list, or is a part of such a name, or is inside of it."""
    if name.startswith("."):
        return name[1:] in LAST_PARTS or not is_private(name[1:])
    return any(
        f"{name}.".startswith(f"{listed}.") or f"{listed}.".startswith(f"{name}.")
        for listed in LISTED
    )


@cache
def trees() -> dict[Path, ast.Module]:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "torch_private.py"]
    return {path: ast.parse(path.read_text()) for path in files}


@cache
def own_names() -> set[str]:
    return set().union(*map(defined, trees().values()))


def test_every_private_name_that_is_used_is_listed() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees().items()
        for line, name in unlisted(tree, own_names())
    ]
    assert found == []


def test_every_listed_name_is_used() -> None:
    everything = {name for tree in trees().values() for _, name in used(tree, own_names())}
    inside = {name for name in everything if not name.startswith(".")}
    text = "\n".join(path.read_text() for path in trees())
    for name in LISTED:
        last = name.rpartition(".")[2]
        by_path = any(
            f"{name}.".startswith(f"{n}.") or f"{n}.".startswith(f"{name}.") for n in inside
        )
        assert by_path or f".{last}" in everything or f'"{last}"' in text, name


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._a_secret()",
        "import torch.distributed as dist\ndist.distributed_c10d._a_secret",
        "from torch.distributed.fsdp._fully_shard import FSDPState",
        "import torch._inductor.config",
        "from torch.utils import _python_dispatch as d\nd._a_secret",
        "def f(x): return x.grad._a_secret",
        "def f(x): return x._is_view()",
        "def f(x): return getattr(x, '_a_secret', None)",
        "from torch.distributed.tensor import DTensor\nDTensor._a_secret",
    ],
)
def test_a_name_that_is_not_listed_is_found(source: str) -> None:
    """What the tests above rely on."""
    tree = ast.parse(f"import torch\n{source}")
    assert len(unlisted(tree, own_names())) >= 1


def noted_by_schedulers() -> Any:
    """An optimizer whose step was counted by a scheduler."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("entry", torch_private.NAMES, ids=lambda entry: entry.name)
def test_this_torch_has_every_listed_name(entry: torch_private.PrivateName) -> None:
    made = "torch.optim.Optimizer."
    if entry.name.endswith(("._opt_called", "._wrapped_by_lr_sched")):
        found: Any = noted_by_schedulers()
        for part in entry.name.removeprefix(made).split("."):
            found = getattr(found, part)
        assert found is True
    elif entry.without and entry.name in NEW and torch.__version__ < NEW[entry.name]:
        pytest.skip(f"since torch {NEW[entry.name]}; without it: {entry.without}")
    elif entry.name.endswith("_nccl_trace") and not dist.is_nccl_available():
        pytest.skip(f"a build without NCCL; without it: {entry.without}")
    else:
        assert torch_private.find(entry.name) is not None
    assert entry.use
    assert set(entry.checked) <= set(versions.tested_torch())


def test_a_torch_without_a_name_that_is_needed_is_an_error_with_all_such_names() -> None:
    names = (
        torch_private.PrivateName("torch._C._gone", "counting uses"),
        torch_private.PrivateName("torch._absent.thing", "something else"),
        torch_private.PrivateName("torch._C._also_gone", "a nicety", without="nothing happens"),
        *torch_private.NAMES,
    )
    with pytest.raises(ImportError) as caught:
        torch_private.check(names)
    text = str(caught.value)
    assert "torch._C._gone: counting uses" in text
    assert "torch._absent.thing: something else" in text
    assert "_also_gone" not in text
    assert torch.__version__ in text
    assert "2.11 to 2.15" in text
    assert len(text.splitlines()) == 3
