"""Muon for sharded matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..dtensor.parts import local_part, placed_like, zeros_like
from .exchange import Layout
from .whole import BATCH_BYTES, WholeTask, run_whole


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for matrices that are sharded in any way.

    Momentum and weight decay are elementwise and stay sharded. The momentum matrix is assembled on
    one rank in bfloat16, the dtype Muon computes in, orthogonalized there, and the update is
    scattered. The matrices are distributed over the ranks by cost. The result is the same as with
    `torch.optim.Muon` on one process. The state consists of DTensors like the parameters, under
    torch's names, so checkpoints of either can be loaded into the other.

    Use it for the matrices of hidden layers, and an elementwise optimizer for embeddings, heads,
    norms and biases.

    The algorithm: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
    (2024), https://kellerjordan.github.io/posts/muon/; ``adjust_lr_fn="match_rms_adamw"``: Liu et
    al., "Muon is Scalable for LLM Training", arXiv 2502.16982.

    Args:
        params: 2-D parameters, DTensors or plain, or groups of them.
        batch_bytes: bytes of whole matrices that a rank handles at a time; see `run_whole`.
        kwargs: the arguments of `torch.optim.Muon`: ``lr``, ``weight_decay``, ``momentum``,
            ``nesterov``, ``ns_coefficients``, ``eps``, ``ns_steps``, ``adjust_lr_fn``.

    Raises:
        ValueError: as `torch.optim.Muon`, for example for parameters that are not 2-D.

    Example:
        >>> hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
        >>> optimizer = fsdp2.optim.Muon(hidden, lr=0.02, weight_decay=0.01)
    """

    def __init__(self, params: Any, *, batch_bytes: int = BATCH_BYTES, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.batch_bytes = batch_bytes

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; a collective over the meshes of the parameters.

        Args:
            closure: reevaluates the model and returns the loss, which `step` then returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tasks: list[WholeTask] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    tasks.append(self._task(param, group))
        run_whole(tasks, batch_bytes=self.batch_bytes)
        return loss

    def _task(self, param: Tensor, group: dict[str, Any]) -> WholeTask:
        """The step of one parameter."""
        grad, state = param.grad, self.state[param]
        if torch.is_complex(param) or grad.is_sparse:  # type: ignore[union-attr]
            raise RuntimeError("Muon does not support complex parameters and sparse gradients")
        grad = placed_like(grad, param)  # type: ignore[arg-type]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = zeros_like(param)
        momentum = state["momentum_buffer"] = placed_like(state["momentum_buffer"], param)
        layout = Layout.of(param, torch.bfloat16)
        local, local_grad, local_momentum = map(local_part, (param, grad, momentum))
        lr = float(group["lr"])

        def read() -> list[Tensor]:
            local_momentum.lerp_(local_grad, 1 - group["momentum"])
            update = local_momentum
            if group["nesterov"]:
                update = local_grad.lerp(local_momentum, group["momentum"])
            return [update.bfloat16()]

        def compute(update: Tensor) -> list[Tensor]:
            return [
                orthogonalize(
                    update, group["ns_steps"], tuple(group["ns_coefficients"]), eps=group["eps"]
                )
            ]

        def write(update: Tensor) -> None:
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(update, alpha=-lr * lr_factor(group["adjust_lr_fn"], param.shape))

        return WholeTask([layout], [layout], read, compute, write)


def orthogonalize(
    matrix: Tensor,
    steps: int = 5,
    coefficients: tuple[float, ...] = (3.4445, -4.7750, 2.0315),
    *,
    eps: float = 1e-7,
) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns, by Newton-Schulz iterations.

    Each step is X <- a X + b (X X^T) X + c (X X^T)^2 X, which brings singular values near 1: with
    these coefficients to between 0.7 and 1.2 in 5 steps. See Keller Jordan's page on Muon.

    Args:
        matrix: 2-D; computed in bfloat16.
        steps: number of iterations.
        coefficients: a, b, c.
        eps: lower limit of the norm by which the matrix is divided.

    Returns:
        A bfloat16 matrix of the same shape.

    Example:
        >>> update = orthogonalize(torch.randn(4, 8))
        >>> update.shape, update.dtype
        (torch.Size([4, 8]), torch.bfloat16)
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_factor(name: str | None, shape: torch.Size) -> float:
    """The factor for a matrix's learning rate."""
    rows, columns = shape
    if name in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    assert name == "match_rms_adamw", name
    return 0.2 * math.sqrt(max(rows, columns))
