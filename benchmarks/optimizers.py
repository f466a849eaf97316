"""Which optimizers `fsdp2.optim.local_step` and `whole_step` take, and why not: a table.

    python -m benchmarks.optimizers > table.md

It asks the two functions about every optimizer class of the libraries that are installed, with
their defaults, on one process. Nothing is trained: `tests/test_optim_*.py` compare steps.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

from fsdp2.optim import local_step, whole_step

LIBRARIES = (
    "torch.optim",
    "pytorch_optimizer",
    "schedulefree",
    "timm.optim",
    "torchao.optim",
    "bitsandbytes.optim",
)
SHAPES = ((96, 64), (8, 12))


def classes(library: str) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(library)
    for name, kind in sorted(vars(module).items()):
        if not inspect.isclass(kind) or name.startswith("_") or kind is torch.optim.Optimizer:
            continue
        if library != "torch.optim" and kind.__module__.startswith("torch.optim"):
            continue
        if hasattr(kind, "step") and hasattr(kind, "zero_grad"):
            yield name, kind


def make(kind: Any) -> Any:
    """An optimizer with its defaults, in training mode where it has one."""
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    rate = inspect.signature(kind.__init__).parameters.get("lr")
    needed = {"lr": 0.01} if rate is not None and rate.default is inspect.Parameter.empty else {}
    optimizer = kind(params, **needed)
    if "train_mode" in optimizer.param_groups[0]:
        optimizer.train()
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizer


def verdict(kind: Any, wrap: Any) -> str:
    """``yes``, or the message, of a first step."""
    try:
        optimizer = make(kind)
    except Exception as error:
        return f"(cannot be made with its defaults: {type(error).__name__})"
    try:
        wrap(optimizer).step()
    except Exception as error:
        text = str(error).split(". It would see only")[0].split(". whole_step steps")[0]
        text = text.split(" is not elementwise: ")[-1]
        text = text.split(" is not one that steps each parameter on its own: ")[-1]
        return "no: " + " ".join(text.split()).replace("|", "/")[:140]
    return "yes"


def main() -> None:
    warnings.simplefilter("ignore")
    for library in LIBRARIES:
        try:
            found = list(classes(library))
        except ImportError:
            continue
        version = metadata.version(library.split(".")[0])
        print(f"\n## {library} {version.split('+')[0]}\n")
        print("| optimizer | `local_step` | `whole_step` |\n|---|---|---|")
        with torch.compiler.set_stance("force_eager"):
            for name, kind in found:
                torch.manual_seed(0)
                row = [verdict(kind, wrap) for wrap in (local_step, whole_step)]
                print(f"| {name} | {row[0]} | {row[1]} |", flush=True)


if __name__ == "__main__":
    main()
