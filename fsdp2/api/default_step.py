"""Steps of torch's elementwise optimizers on local shards, without a call by the user.

A step over DTensors gives the same result as a step over the local shards, but with DTensor's
dispatch around each operation. This holds for the optimizers of `ELEMENTWISE`, so their `step` is
replaced. If `fully_shard` has sharded all parameters, the new step works on their local tensors, as
`local_step` or `flat_step` do. The original step handles everything else: subclasses, other
parameters, differentiable steps, and steps that torch.compile traces.

Any step counts as a write to the shards: units that stay gathered compare version counters, to
gather again what was written, and fused kernels do not change the counters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from ..common.torch_patches import register, replace
from ..runtime.events import UnitPart, registry
from ..runtime.torch_modes import skip_compile
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
        register(_count_writes, functools.partial(register_optimizer_step_post_hook, _count_writes))


@skip_compile
def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Of all DTensors: to find out which are ours would take longer than to count.
    torch.autograd.graph.increment_version([
        param._local_tensor
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(param, DTensor)
    ])  # fmt: skip


def _step_of(kind: Any, inherited: Any) -> Callable[..., Any]:
    hooked = getattr(inherited, "hooked", False)
    raw = inherited.__wrapped__ if hooked else inherited

    @functools.wraps(raw)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        # A subclass may compute anything around this step.
        if torch.compiler.is_compiling() or type(self) is not kind:
            return raw(self, closure)
        params = _params_of(self)
        if not params.shards or any(g["differentiable"] for g in self.param_groups):
            return raw(self, closure)
        return _step_locally(self, params, raw, closure)

    if not hooked:
        return step
    # What torch does when it makes the first optimizer of a class.
    made: Any = Optimizer.profile_hook_step(step)
    made.hooked = True
    return made


_local_of = attrgetter("_local_tensor")


@dataclass
class _Params:
    """The parameters of an optimizer, with facts that hold as long as they stay the same.

    Attributes:
        shards: their local tensors, which moving or casting replaces; empty if this package has not
            sharded all parameters.
        may_be_flat: whether a step on flat tensors gives the same bits (unless it is fused) and
            finding these tensors does not make the host wait.
    """

    all: list[Tensor]
    shards: list[Tensor]
    may_be_flat: bool

    @classmethod
    def of(cls, params: list[Tensor]) -> _Params:
        are_sharded = all(managed_param(param) is not None for param in params)
        shards = list(map(_local_of, params)) if are_sharded else []
        # Some kernels of the CPU round the last elements of a tensor, which do not fill a vector
        # register, differently from the rest: the fused ones, and `add(alpha=)` of 16 bits. On an
        # accelerator foreach kernels are the default, and to find flat tensors reads numbers from
        # it, for which the host would wait.
        may_be_flat = all(shard.device.type == "cpu" and shard.itemsize >= 4 for shard in shards)
        return cls(params, shards, may_be_flat)

    def are(self, params: list[Tensor]) -> bool:
        return (
            len(self.all) == len(params)
            and all(map(is_, self.all, params))
            and (not self.shards or all(map(is_, map(_local_of, params), self.shards)))
        )


_known: WeakKeyDictionary[Optimizer, _Params] = WeakKeyDictionary()


def _params_of(optimizer: Optimizer) -> _Params:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = _known.get(optimizer)
    if known is not None and known.are(params):
        return known
    found = _known[optimizer] = _Params.of(params)
    return found


def _step_locally(
    optimizer: Any, params: _Params, raw: Callable[..., Any], closure: Callable[[], Any] | None
) -> Any:
    from ..optim.flat import InPlaceView
    from ..optim.local import LocalView, step_in

    fused = any(group.get("fused") for group in optimizer.param_groups)
    flat = params.may_be_flat and not fused
    return step_in(InPlaceView if flat else LocalView, optimizer, raw, closure)


registry.add(_DefaultSteps())
