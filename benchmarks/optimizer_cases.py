"""The optimizers of several libraries, and how to construct each.

An optimizer that wraps another one is constructed around AdamW or SGD, to which `local_step` and
`whole_step` are applied.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LIBRARIES = (
    "torch.optim",
    "pytorch_optimizer",
    "schedulefree",
    "timm.optim",
    "torchao.optim",
    "bitsandbytes.optim",
)
Wrap = Callable[[Any], Any]
Make = Callable[[Any, nn.Module, Wrap], Any]

# Not trained, and why.
LEFT_OUT = {
    ("torch.optim", "SparseAdam"): "for sparse gradients only",
    ("pytorch_optimizer", "AdaLOMO"): "steps inside backward, on plain models",
    ("pytorch_optimizer", "LOMO"): "steps inside backward, on plain models",
    ("pytorch_optimizer", "CPUOffloadOptimizer"): "needs a GPU",
    ("torchao.optim", "CPUOffloadOptimizer"): "needs a GPU",
    ("pytorch_optimizer", "DeMo"): "own gradient synchronization",
    ("pytorch_optimizer", "DistributedMuon"): "own gradient synchronization",
    ("pytorch_optimizer", "GSAM"): "runs the model itself",
    ("pytorch_optimizer", "PCGrad"): "runs several backwards itself",
    ("pytorch_optimizer", "LoRARite"): "for pairs of LoRA matrices only",
    ("pytorch_optimizer", "AdaHessian"): "needs Hessian-vector products",
    ("pytorch_optimizer", "SophiaH"): "needs Hessian-vector products",
    ("timm.optim", "Adahessian"): "needs Hessian-vector products",
}


def inner(model: nn.Module, wrap: Wrap) -> Any:
    return wrap(torch.optim.AdamW(model.parameters(), lr=0.01))


def around(kind: Any, model: nn.Module, wrap: Wrap) -> Any:
    return kind(inner(model, wrap))


def around_sgd(kind: Any, model: nn.Module, wrap: Wrap) -> Any:
    """For wrappers that store something in the state before the inner optimizer does."""
    return kind(wrap(torch.optim.SGD(model.parameters(), lr=0.01)))


def sharpness_aware(kind: Any, model: nn.Module, wrap: Wrap) -> Any:
    return wrap(kind(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01))


def muon(kind: Any, model: nn.Module, wrap: Wrap) -> Any:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return wrap(kind(groups))


def options(**values: Any) -> Make:
    return lambda kind, model, wrap: wrap(kind(model.parameters(), **values))


def matrices_only(kind: Any, model: nn.Module, wrap: Wrap) -> Any:
    return wrap(kind([p for p in model.parameters() if p.ndim == 2]))


MAKERS: dict[tuple[str, str], Make] = {
    **{
        ("pytorch_optimizer", name): around
        for name in ("Lookahead", "OrthoGrad", "TRAC", "SafeFP16Optimizer",
                     "Magma")
    },
    **{
        ("pytorch_optimizer", name): sharpness_aware for name in ("SAM", "FriendlySAM", "LookSAM")
    },
    **{("pytorch_optimizer", name): muon
       for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")},
    ("torch.optim", "Muon"): matrices_only,
    ("pytorch_optimizer", "ScheduleFreeWrapper"): around_sgd,
    ("schedulefree", "ScheduleFreeWrapper"): around_sgd,
    ("schedulefree", "ScheduleFreeWrapperReference"): around_sgd,
    ("timm.optim", "Lookahead"): around,
    ("timm.optim", "SGDP"): options(lr=0.01, momentum=0.9),
    **{("bitsandbytes.optim", name): options(lr=0.01, momentum=0.9)
       for name in ("LARS", "LARS32bit", "LARS8bit", "PytorchLARS", "SGD", "SGD32bit", "SGD8bit")},
    ("pytorch_optimizer", "BSAM"): options(num_data=1000),
    ("pytorch_optimizer", "Ranger21"): options(num_iterations=20),
    ("pytorch_optimizer", "AliG"): options(max_lr=0.1),
    ("pytorch_optimizer", "AdaShift"): options(keep_num=3),
    ("pytorch_optimizer", "AdamMini"): lambda kind, model, wrap: wrap(kind(model, lr=0.01)),
    ("pytorch_optimizer", "WSAM"): lambda kind, model, wrap: wrap(
        kind(model, model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01)
    ),
}  # fmt: skip
# Their step calls the closure, which runs forward and backward.
CALL_CLOSURES = {"LBFGS", "AliG", "SAM", "FriendlySAM", "LookSAM", "WSAM", "BSAM"}


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer class.

    Attributes:
        with_closure: whether its step takes the closure that computes gradients.
        left_out: why it is not trained; empty if it is.
    """

    library: str
    name: str

    @property
    def left_out(self) -> str:
        return LEFT_OUT.get((self.library, self.name), "")

    @property
    def with_closure(self) -> bool:
        return self.name in CALL_CLOSURES or self.name.endswith("Closure")

    @property
    def quantizes(self) -> bool:
        return self.library in ("torchao.optim", "bitsandbytes.optim")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes to compare in; the first in which one process can step is used."""
        if self.quantizes:  # written for these dtypes
            return (torch.float32,)
        return (torch.float64, torch.float32)

    def make(self, model: nn.Module, wrap: Wrap) -> Any:
        """The optimizer with its defaults, in training mode if it has one."""
        kind = vars(importlib.import_module(self.library))[self.name]
        maker = MAKERS.get((self.library, self.name))
        if maker is None:
            rate = inspect.signature(kind.__init__).parameters.get("lr")
            needs_rate = rate is not None and rate.default is inspect.Parameter.empty
            maker = options(lr=0.01) if needs_rate else options()
        optimizer = maker(kind, model, wrap)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        return optimizer


def cases(library: str) -> Iterator[OptimizerCase]:
    """All optimizer classes of a library.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module(library)
    for name, kind in sorted(vars(module).items()):
        if not inspect.isclass(kind) or name.startswith("_") or kind is torch.optim.Optimizer:
            continue
        if library != "torch.optim" and kind.__module__.startswith("torch.optim"):
            continue
        if hasattr(kind, "step") and hasattr(kind, "zero_grad"):
            yield OptimizerCase(library, name)
