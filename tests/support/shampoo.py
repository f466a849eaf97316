"""A small Shampoo, to show what it takes to write an optimizer with `fsdp2.optim.run_whole`.

Gupta, Koren, Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (arXiv 1802.09568),
for matrices: with G the gradient, L <- L + G G^T, R <- R + G^T G, W <- W - lr L^(-1/4) G R^(-1/4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.optim import Layout, WholeTask, run_whole


def inverse_root(matrix: Tensor) -> Tensor:
    """matrix^(-1/4) of a symmetric positive one."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.T


def updated(gradient: Tensor, left: Tensor, right: Tensor) -> list[Tensor]:
    """The update, and both preconditioners, from whole matrices."""
    left += gradient @ gradient.T
    right += gradient.T @ gradient
    return [inverse_root(left) @ gradient @ inverse_root(right), left, right]


class PlainShampoo(torch.optim.Optimizer):
    """On plain tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["left"], state["right"] = (
                            1e-3 * torch.eye(n, dtype=p.dtype) for n in p.shape
                        )
                    update, state["left"], state["right"] = updated(
                        p.grad, state["left"], state["right"]
                    )
                    p.sub_(update, alpha=group["lr"])


class ShardedShampoo(PlainShampoo):
    """On DTensors: the preconditioners are sharded by rows; whole only on a matrix's owner."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        run_whole(
            [
                self._task(p, group["lr"])
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None
            ],
            batch_bytes=2000,  # several batches, also with the small matrices of a test
        )

    def _task(self, param: DTensor, lr: float) -> WholeTask:
        layout, state = Layout.of(param), self.state[param]
        placements = tuple(
            Replicate() if p.is_replicate() or d else Shard(0)
            for d, p in enumerate(param.placements)
        )
        sides = [Layout(layout.mesh, placements, (n, n), layout.dtype) for n in param.shape]
        if not state:
            for key, side in zip(("left", "right"), sides, strict=True):
                rows = side.cut.box(tuple(param.device_mesh.get_coordinate() or ()))
                eye = 1e-3 * torch.eye(side.shape[0], dtype=param.dtype)
                state[key] = side.wrap(eye[rows.start[0] : rows.start[0] + rows.shape[0]].clone())
        left, right = state["left"].to_local(), state["right"].to_local()
        assert isinstance(param.grad, DTensor)
        gradient = param.grad.to_local()

        def write(update: Tensor, new_left: Tensor, new_right: Tensor) -> None:
            param.to_local().sub_(update, alpha=lr)
            left.copy_(new_left)
            right.copy_(new_right)

        layouts = [layout, *sides]
        return WholeTask(layouts, layouts, lambda: [gradient, left, right], updated, write)
