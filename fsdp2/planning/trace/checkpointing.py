"""Activation checkpointing of modules, while a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

MODES = ("none", "selective", "full")

# Expensive operations whose results `selective` keeps, in addition to every second matrix
# multiplication. From torchtitan's op-level selective checkpointing (torchtitan/models/llama3,
# _save_list).
_KEPT = frozenset(
    f"aten::{name}"
    for name in (
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "max",
    )
)
_MATMULS = frozenset(("aten::mm", "aten::addmm"))


@contextmanager
def checkpointed(
    module: nn.Module, mode: str, around: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Context in which ``module`` recomputes its activations in backward.

    Args:
        around: creates the context of each forward, the original and the repeated one.
        mode: "none"; "full": only inputs are kept; "selective": results of attention and of every
            second matrix multiplication are kept, too.

    Raises:
        ValueError: for any other mode.
    """
    if mode not in MODES:
        raise ValueError(f"activation_checkpointing must be one of {MODES}, got {mode!r}")
    if mode == "none":
        yield
        return
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    module.forward = apply_checkpointing(noted, mode)
    try:
        yield
    finally:
        del module.forward


def apply_checkpointing(forward: Any, mode: str) -> Any:
    """``forward`` with its activations recomputed in backward; mode "full" or "selective"."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    return partial(checkpoint, forward, **options)


def _selective_contexts() -> Any:
    kept = {False: Selective(), True: Selective()}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return kept[ctx.is_recompute].policy_of(func)

    return create_selective_checkpoint_contexts(policy)


class Selective:
    """The decisions of "selective" about the operators of a forward, one after the other."""

    def __init__(self) -> None:
        self._num_matmuls = 0

    def policy_of(self, func: Any) -> CheckpointPolicy:
        """Whether the result of the next operator is kept."""
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in _MATMULS:
            self._num_matmuls += 1
            keep = self._num_matmuls % 2 == 1
        else:
            keep = name in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
