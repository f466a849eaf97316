"""How large the core is, and how much of it a step enters.

    python -m benchmarks.structure          # a table
    python -m benchmarks.structure --calls  # and every function that is entered

Questions of a first-time reader of the code: how many lines are there, how many files and functions
do one call of ``fully_shard`` and one training step go through, and how long does a step stay in
one file? torch's FSDP2 is counted the same way, as a scale.

Code lines are those that hold a statement: no blanks, no comments, no docstrings, no ``@override``.
Functions are those that do something: not what a protocol or the list of events only declares.
Steps run as rank 0 of a `fake` group of two, so that one process is enough and every collective is
still called, on the path of the backends that coalesce them. ``tests/tools/test_structure.py``
holds the numbers to limits.

Branch points are those of McCabe (1976) in the functions that a step enters: conditions, loops,
handlers, and each ``and`` and ``or``. Fields are what the methods of a class assign to ``self``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2

PACKAGE = Path(fsdp2.__file__).parent
TORCH = Path(inspect.getfile(inspect.unwrap(torch_fully_shard))).parent
# What a training step is made of. The kernel is to train alone; parts are what can be left out.
KERNEL = ("policy.py", "sharding", "comm", "runtime", "api/fully_shard.py", "api/module.py")
PARTS = ("transports", "features", "guards", "api/comm_settings.py")

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
# They tell readers and type checkers what follows.
_LIKE_COMMENTS = ("@override", "from typing_extensions import override")


@dataclass
class Size:
    """Of some files: lines with code, functions, lines that are comments by themselves."""

    files: int = 0
    code_lines: int = 0
    functions: int = 0
    comments: int = 0
    largest: tuple[int, str] = (0, "")

    @property
    def comments_per_100(self) -> float:
        return 100 * self.comments / max(1, self.code_lines)


@dataclass
class Entered:
    """The functions of a package that ran, as (file, name), in the order of their calls."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set(self.calls)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def calls_per_file_change(self) -> float:
        """How many calls stay in a file before one goes to another."""
        changes = sum(before[0] != after[0] for before, after in pairwise(self.calls))
        return len(self.calls) / max(1, changes)


def files_of(rooms: Iterable[str]) -> list[Path]:
    """Their files, without the ``__init__.py`` of folders."""
    found: list[Path] = []
    for name in rooms:
        path = PACKAGE / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if path.name != "__init__.py"]


def core_files() -> list[Path]:
    """The files of the kernel and of its parts."""
    return files_of(KERNEL + PARTS)


def size_of(paths: list[Path]) -> Size:
    """Count what is in ``paths``."""
    size = Size(files=len(paths))
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        with_code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                size.comments += token.line.lstrip().startswith("#")
            elif token.line.strip() in _LIKE_COMMENTS:
                continue
            elif token.type not in _NO_CODE:
                with_code.update(range(token.start[0], token.end[0] + 1))
        with_code -= _docstring_lines(tree)
        size.code_lines += len(with_code)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size.functions += not all(map(_declares, node.body))
                lines = with_code.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
                size.largest = max(size.largest, (len(lines), f"{path.stem}.{node.name}"))
    return size


def _declares(statement: ast.stmt) -> bool:
    """Whether ``statement`` is a docstring or an ellipsis."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def branch_points(package: Path, entered: Entered) -> int:
    """The branch points of the functions in ``entered``."""
    count = 0
    for file in entered.files:
        names = {function for path, function in entered.functions if path == file}
        for name, function in _functions(ast.parse((package / file).read_text())):
            if name in names:
                count += sum(map(_branches, _inside(function)))
    return count


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions in ``tree``, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
            yield from _functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _inside(node)


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler)


# The classes of a step, by the file that each is in.
CLASSES = {
    "Runtime": "runtime/runtime.py",
    "Unit": "runtime/unit.py",
    "ParamGroup": "runtime/param_group.py",
    "Bucket": "sharding/bucket.py",
    "Reduction": "runtime/reduction.py",
}


def fields_of(name: str) -> list[str]:
    """The fields of one of `CLASSES`."""
    tree = ast.parse((PACKAGE / CLASSES[name]).read_text())
    cls = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    assigned = (
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return sorted(set(assigned))


@contextmanager
def entering(package: Path) -> Iterator[Entered]:
    """Note the functions of ``package`` that are called inside.

    In this thread only: that is where autograd runs a backward of tensors on the CPU. Lambdas and
    comprehensions are not counted; Python 3.12 does not call the latter any more.
    """
    entered = Entered()
    start = f"{package}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(start) and code.co_name[0] != "<":
            entered.calls.append((code.co_filename[len(start) :], code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(before)


class Block(nn.Module):
    """A normalization and two matrices, with a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


FIRST, STEADY = "shard and train one step", "a steady step"


def measure(
    fully_shard: Callable[..., Any] = fsdp2.fully_shard, package: Path = PACKAGE
) -> dict[str, Entered]:
    """Shard a small model over the default process group and train it: what runs when."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
    tokens = torch.randint(64, (2, 8))

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(tokens).square().mean().backward()
        # Not the optimizer's step: what DTensors run in torch's is not counted either.
        counting = sys.getprofile()
        sys.setprofile(None)
        optimizer.step()
        sys.setprofile(counting)
        optimizer.zero_grad()

    with entering(package) as first:
        for block in (model[1], model[2]):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        step(optimizer)
    for _ in range(3):
        step(optimizer)
    with entering(package) as steady:
        step(optimizer)
    return {FIRST: first, STEADY: steady}


def make_group() -> None:
    """A default process group of two ranks, of which this is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def measure_alone() -> dict[str, Entered]:
    """Measure in a process that did nothing else.

    What other models set up for a whole process would be counted with ours: a hook on all
    optimizers, say.
    """
    make_group()
    try:
        return measure()
    finally:
        dist.destroy_process_group()


def show(measured: dict[str, Entered]) -> None:
    """Print both tables."""
    sizes = {
        "kernel": size_of(files_of(KERNEL)),
        "parts": size_of(files_of(PARTS)),
        "the package": size_of(sorted(PACKAGE.rglob("*.py"))),
        "torch FSDP2": size_of(sorted(TORCH.glob("*.py"))),
    }
    print(
        f"{'':38}{'files':>7}{'code lines':>12}{'functions':>11}{'comments/100':>14}"
        "  largest function"
    )
    for name, size in sizes.items():
        print(
            f"{name:38}{size.files:7}{size.code_lines:12}{size.functions:11}"
            f"{size.comments_per_100:14.1f}  {size.largest[1]}, {size.largest[0]} lines"
        )
    print(
        f"\n{'entered by':38}{'files':>7}{'functions':>12}{'calls':>11}{'calls/file change':>19}"
        f"{'branch points':>15}"
    )
    for name, entered in measured.items():
        branches = branch_points(TORCH if name.endswith("torch") else PACKAGE, entered)
        print(
            f"{name:38}{len(entered.files):7}{len(entered.functions):12}{len(entered.calls):11}"
            f"{entered.calls_per_file_change:19.1f}{branches:15}"
        )
    counts = ", ".join(f"{name} {len(fields_of(name))}" for name in CLASSES)
    print(f"\nfields of the classes of a step: {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description="size of the core, and what a step enters of it")
    parser.add_argument("--calls", action="store_true", help="list the functions, by file")
    options = parser.parse_args()
    make_group()
    measured = measure()
    show(measured | {f"{k}, torch": v for k, v in measure(torch_fully_shard, TORCH).items()})
    if options.calls:
        for name, entered in measured.items():
            print(f"\n{name}:")
            for file in sorted(entered.files):
                inside = sorted(function for path, function in entered.functions if path == file)
                print(f"  {file}: {', '.join(inside)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
