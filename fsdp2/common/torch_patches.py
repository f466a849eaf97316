"""Every attribute of torch that this package replaces, and the one function that does it.

torch has no hook in these places, and a subclass of ours would not be asked: users and other
libraries call torch's own classes. A replacement lasts as long as the process, as any later call
may be about a sharded model.

With ``FSDP2_PATCH_TORCH=0`` in the environment nothing is replaced: to find out whether a problem
comes from here, or because another library replaces the same attribute. Training then gives the
same results; each entry states what is lost.

Hooks and kernels that torch lets anybody register replace nothing, so they stay. They are listed
here as well, because they too see calls that are not about sharded models.

Not listed are changes of single objects (modules, optimizers, storages) and of their classes made
by `classes.class_for`, and replacements that a context undoes. `tests/unit/test_torch_patches.py`
searches the source for anything else.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE = "FSDP2_PATCH_TORCH"


@dataclass(frozen=True)
class Patch:
    """Attributes of torch that are replaced, or added, for one reason.

    Attributes:
        owner: the class or module that has them, as a dotted path.
        names: of the attributes; ``Class.name`` if the owner is a module with several classes.
        when: the first call that replaces them.
        reason: what this achieves.
        cost: for calls that do not involve sharded parameters.
        without: what happens with ``FSDP2_PATCH_TORCH=0``.
        adds: whether torch has no such attributes; others are left out where torch lacks them.
    """

    owner: str
    names: tuple[str, ...]
    when: str
    reason: str
    cost: str
    without: str
    adds: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(f"{self.owner}.{name}" for name in self.names)


_SHARD = "`fully_shard`"
_FORWARD = "the first forward"

PATCHES = (
    Patch(
        "torch.distributed.tensor.DTensor",
        ("copy_", "numpy", "tolist"),
        _SHARD,
        "errors name the parameter and what to call instead",
        "two Python calls",
        "only torch's message",
    ),
    Patch(
        "torch.distributed.tensor.DTensor",
        ("__setitem__",),
        _SHARD,
        "as above; `param[0] = value` on a sharded dim raises an error",
        "one more indexing operation on DTensors",
        "such a write changes a copy and is lost",
    ),
    Patch(
        "torch.nn.Parameter",
        ("full_tensor", "to_local", "redistribute", "device_mesh", "placements"),
        _SHARD,
        "errors explain why a gathered parameter lacks these; `hasattr` stays False",
        "none",
        "only Python's message",
        adds=True,
    ),
    Patch(
        "torch.distributed.tensor.DTensor",
        ("full_tensor",),
        _SHARD,
        "timeout errors name the parameter and the missing ranks",
        "two Python calls",
        "only the backend's message",
    ),
    Patch(
        "torch.nn.utils.clip_grad",
        ("_get_total_norm", "_clip_grads_with_norm_"),
        _SHARD,
        "as above, for `clip_grad_norm_`; errors suggest `fsdp2.clip_grad_norm_`",
        "one Python call",
        "only torch's and the backend's messages",
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        ("_get_managed_modules",),
        _SHARD,
        "torch's `fully_shard` rejects modules sharded by fsdp2",
        "one walk over the modules",
        "torch's `AssertionError` or `TypeError`",
    ),
    Patch(
        "torch.optim.Optimizer",
        ("load_state_dict",),
        _SHARD,
        "an unsharded model's state is sharded when loaded",
        "a check of each parameter",
        "the next step raises an error from torch",
    ),
    Patch(
        "torch.optim",
        (
            *("ASGD.step", "Adadelta.step", "Adagrad.step", "AdamW.step", "Adam.step"),
            *("Adamax.step", "NAdam.step", "RAdam.step", "RMSprop.step", "Rprop.step", "SGD.step"),
        ),
        _SHARD,
        "steps run on local shards; `fsdp2.optim.dtensor_step(optimizer)` turns this off",
        "two Python calls",
        "these steps are several times slower",
    ),
    Patch(
        "torch.autograd.graph",
        ("_engine_run_backward",),
        _SHARD,
        "`backward(inputs=...)` with sharded parameters computes their gradients",
        "one Python call per backward; with `inputs`, a check of each",
        "no gradients are computed; the next optimizer step warns if there are none at all",
    ),
    Patch(
        "torch.autograd",
        ("_engine_run_backward",),
        _SHARD,
        "as above, for the copy that `torch.autograd` imports; errors in `torch.autograd.grad` "
        "name what to call instead",
        "see above",
        "see above; `grad` raises torch's error or returns None",
    ),
    Patch(
        "torch.optim.Optimizer",
        ("add_param_group",),
        _FORWARD,
        "building an optimizer over gathered parameters raises an error",
        "a check of each parameter",
        "its first step raises an error",
    ),
    Patch(
        "torch.optim.Optimizer",
        ("zero_grad",),
        _FORWARD,
        "frees gradients set to None; after a failed backward, waits for its reductions before "
        "writing zeros",
        "a check of each unit",
        "gradients are freed at the next forward; after a failed backward, call "
        "`model.zero_grad()`",
    ),
    Patch(
        "torch.distributed.tensor.placement_types._StridedShard",
        ("_split_tensor", "__repr__", "__str__"),
        "`shard_granularity=`",
        "makes shards end at block boundaries",
        "two Python calls",
        "`shard_granularity=` raises `NotImplementedError`",
    ),
    Patch(
        "torch.distributed.tensor._redistribute",
        ("_gen_transform_infos_non_cached",),
        "`shard_granularity=`",
        "as above, on multi-dimensional meshes",
        "a check of each new pair of placements",
        "`shard_granularity=` raises `NotImplementedError`",
    ),
)

# Function in the package -> what for. The first six are hooks of the steps of all optimizers.
REGISTERED = {
    "guards.optimizer_checks._check_unreduced": (
        "warns about steps taken before gradients are reduced"
    ),
    "guards.optimizer_checks._check_originals": "rejects optimizers built before `fully_shard`",
    "guards.optimizer_checks._check_flattening": "rejects LBFGS on uneven shards",
    "guards.optimizer_checks._check_unpatched": f"with `{VARIABLE}=0`, checks each optimizer step",
    "api.default_step._count_writes": "marks shards as written, also by fused kernels",
    "optim.quantized.warn_of_differences": "warns about state that is quantized shard by shard",
    "api.library_methods._check_registration": "rejects `torch.nn.utils.prune` on shards",
    "dtensor.memory._record_stream": "extends `record_stream` on a shard to the whole memory block",
}

_PATCH_OF = {path: patch for patch in PATCHES for path in patch.paths}

_replaced: set[str] = set()
_registered: dict[str, Any] = {}  # function -> what registering it returned


def patches_torch() -> bool:
    """Whether attributes of torch may be replaced."""
    return os.environ.get(VARIABLE) != "0"


def replace(path: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of torch, once per process, unless that is switched off.

    Args:
        path: of a name in `PATCHES`.
        make: returns the replacement, given the present value (None if torch has none).

    Raises:
        KeyError: the table does not list it.
    """
    patch = _PATCH_OF[path]
    if path in _replaced or not patches_torch():
        return
    owner_path, _, name = path.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
    except (ImportError, AttributeError):
        return  # a torch without that private module
    before = getattr(owner, name, None)
    if before is not None or patch.adds:
        setattr(owner, name, make(before))
        _replaced.add(path)


def wrap(path: str, call: Callable[..., Any]) -> None:
    """`replace` a function or method by one that calls ``call`` with it and its arguments."""

    def make(inherited: Callable[..., Any]) -> Any:
        partial = functools.partial(call, inherited)
        if not isinstance(pkgutil.resolve_name(path.rpartition(".")[0]), type):
            return functools.update_wrapper(partial, inherited)

        @functools.wraps(inherited)
        def method(*args: Any, **kwargs: Any) -> Any:  # a `partial` would not be given ``self``
            return partial(*args, **kwargs)

        return method

    replace(path, make)


def register(function: Callable[..., Any], how: Callable[[], Any]) -> None:
    """Register a function with torch, once per process.

    Args:
        function: one in `REGISTERED`.
        how: registers it. What it returns is kept.

    Raises:
        KeyError: the table does not list it.
    """
    path = f"{function.__module__}.{function.__qualname__}".partition(".")[2]
    if path not in REGISTERED:
        raise KeyError(path)
    if path not in _registered:
        _registered[path] = how()
