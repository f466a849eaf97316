"""Steps of torch's elementwise optimizers on local shards, without a call by the user.

A step over DTensors computes what a step over the local shards does, with DTensor's dispatch around
each operation. For the optimizers of `ELEMENTWISE` that is known, so their `step` is replaced: if
all parameters are those of `fully_shard`, it shows them as `local_step` or `flat_step` does. All
else is left to the step that the class had: subclasses, other parameters, differentiable steps, and
steps that torch.compile traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..common.torch_patches import replace
from ..runtime.events import UnitPart, registry
from ..runtime.unit import Unit
from ..sharding.param import managed_param

# Of torch.optim. Adafactor and Muon look at whole matrices, LBFGS at all parameters.
ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "AdamW", "Adam", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


class _DefaultSteps(UnitPart):
    @override
    def sharded(self, unit: Unit) -> None:
        for name in ELEMENTWISE:
            kind = getattr(torch.optim, name)
            replace(f"torch.optim.{name}.step", functools.partial(_step_of, kind))


def _step_of(kind: Any, inherited: Any) -> Callable[..., Any]:
    hooked = getattr(inherited, "hooked", False)
    raw = inherited.__wrapped__ if hooked else inherited

    @functools.wraps(raw)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        # A subclass may compute anything around this step.
        if torch.compiler.is_compiling() or type(self) is not kind or not _may_be_local(self):
            return raw(self, closure)
        return _step_locally(self, raw, closure)

    if not hooked:
        return step
    # What torch does when it makes the first optimizer of a class.
    made: Any = Optimizer.profile_hook_step(step)
    made.hooked = True
    return made


def _may_be_local(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    if any(group["differentiable"] for group in groups):
        return False
    params = [param for group in groups for param in group["params"]]
    known = _sharded.get(optimizer, ())
    if len(known) == len(params) and all(map(is_, known, params)):
        return True
    if not params or any(managed_param(param) is None for param in params):
        return False
    _sharded[optimizer] = params
    return True


# Optimizers of which all parameters are sharded, and these.
_sharded: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()


def _step_locally(optimizer: Any, raw: Callable[..., Any], closure: Any) -> Any:
    from ..optim.flat import InPlaceView
    from ..optim.local import LocalView, step_in

    return step_in(InPlaceView if _may_be_flat(optimizer) else LocalView, optimizer, raw, closure)


def _may_be_flat(optimizer: Optimizer) -> bool:
    # Some kernels of the CPU round the last elements of a tensor, which do not fill a vector
    # register, differently from the rest: the fused ones, and `add(alpha=)` of 16 bits. On an
    # accelerator foreach kernels are the default, and to find flat tensors reads numbers from it,
    # for which the host would wait.
    return not any(group.get("fused") for group in optimizer.param_groups) and all(
        param.device.type == "cpu" and param.itemsize >= 4 for param in _sharded[optimizer]
    )


registry.add(_DefaultSteps())
