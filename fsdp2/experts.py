"""Mixtures of experts: expert parameters on a separate mesh, and routing of tokens to them.

The data-parallel ranks form a mesh with a dim for experts, here "ep". Along it, every rank keeps
some of the experts and sends tokens to the other ranks by all-to-all. Along the other dims,
`fully_shard` shards (and replicates) the parameters of these experts. For eight ranks and eight
experts, two per rank::

    mesh (2, 4): "efsdp", "ep"      ep 0        ep 1        ep 2        ep 3
                       efsdp 0      rank 0      rank 1      rank 2      rank 3
                       efsdp 1      rank 4      rank 5      rank 6      rank 7
                       experts      0, 1        2, 3        4, 5        6, 7

Tensor-parallel ranks are part of this mesh too; they hold parts of the same batch.
`shard_experts` shards the parameters, and `TokenExchange` moves the tokens of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

# First: its error names all that this torch lacks.
from .common import torch_private as torch_private  # isort: split

from .api.fully_shard import fully_shard
from .common.failures import reraise
from .common.pytree import tensors_in
from .dtensor.from_local import dtensor_over

__all__ = ["TokenExchange", "local_experts", "shard_experts"]


# -- parameters ----------------------------------------------------------------------------------


def shard_experts(
    module: Any,
    *,
    mesh: DeviceMesh,
    expert_dim: str = "ep",
    data_ranks: int | None = None,
    **options: Any,
) -> Any:
    """Keep this rank's experts of ``module``, sharded over the ranks that have the same experts.

    Dim 0 of every parameter must be the expert, for example (num_experts, in, out). It is split
    along ``expert_dim`` of ``mesh`` like ``torch.chunk``, without communication. Then
    `fully_shard` is called with the other dims. Call this before `fully_shard` on the enclosing
    block.

    Gradients are summed over all ranks that have an expert and divided by ``data_ranks``. Each
    expert sees the tokens of a whole row of the mesh, so this is the mean over all data-parallel
    ranks, as for other parameters.

    Call forward on every rank, with zero rows if there are no tokens. Experts without tokens get
    zero gradients. Backward still runs through them, so all ranks make the same gathers and
    reductions.

    The rest of a model may be tensor-parallel. Then ``mesh`` includes the tensor-parallel ranks.
    Each of them sends a part of the tokens of their batch, so no token is computed twice, and
    ``data_ranks`` is the number of tensor-parallel groups. The experts are not tensor-parallel.

    Args:
        module: the experts. In ``forward``, parameters are DTensors over ``expert_dim``; call
            `local_experts` on them to compute.
        mesh: all ranks that send tokens, with one dim named ``expert_dim``. With one more dim:
            shard over it. With two more: replicate over the first, shard over the second. The
            data-parallel mesh of the rest of the model need not be a slice of it.
        expert_dim: name of the dim over which experts are distributed.
        data_ranks: number of data-parallel ranks over which gradients are averaged. If the ranks of
            a tensor-parallel group send parts of one batch: ``mesh.size()`` divided by the ranks
            per group. None: ``mesh.size()``, if each rank sends all tokens of its batch.
        options: arguments of `fully_shard`. Without ``shard_placement_fn``, parameters are sharded
            on dim 0 if there are at least as many local experts as shards, else on dim 1.

    Returns:
        ``module``.

    Raises:
        ValueError: for a mesh without ``expert_dim``, or with too few or too many other dims; for
            ``data_ranks`` that does not divide the size of the mesh; for parameters with different
            sizes of dim 0; or for parameters that are already distributed.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("efsdp", "ep"))
        >>> data = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
        >>> for block in model.blocks:
        ...     shard_experts(block.experts, mesh=mesh)
        ...     fully_shard(block, mesh=data)
    """
    names = mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name != expert_dim)
    if expert_dim not in names or len(others) not in (1, 2):
        raise ValueError(
            f"shard_experts needs a mesh with a dim '{expert_dim}' and one or two more, to shard "
            f"or to replicate and shard over; got dims {names} (a dim may have size 1)"
        )
    data_ranks = mesh.size() if data_ranks is None else data_ranks
    if data_ranks < 1 or mesh.size() % data_ranks:
        raise ValueError(
            f"data_ranks must divide the {mesh.size()} ranks of the mesh of experts, got "
            f"{data_ranks}: the others are tensor-parallel ranks with parts of the same batches"
        )
    num_experts = _num_experts(module)
    expert_mesh = mesh[expert_dim]
    _check_not_distributed(module, expert_mesh)
    _deal_out(module, expert_mesh)
    num_shards = mesh.size(names.index(others[-1]))
    num_local = -(-num_experts // expert_mesh.size())

    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if num_local < num_shards and param.ndim > 1 else 0)

    options.setdefault("shard_placement_fn", place)
    module.register_forward_hook(_connect_output, with_kwargs=True)  # before the unit's hooks
    fully_shard(module, mesh=mesh[others], **options)
    module.set_gradient_divide_factor(float(data_ranks))
    module.set_reduce_scatter_unused_params(True)
    return module


def _num_experts(module: nn.Module) -> int:
    sizes = {name: p.shape[0] if p.ndim else 0 for name, p in module.named_parameters()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(
            "Dim 0 of all parameters of shard_experts must be the number of experts, got "
            f"{sizes}: give other parameters (a router, shared experts) to another module"
        )
    return next(iter(sizes.values()))


def _deal_out(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace parameters by DTensors of this rank's experts, sharded on dim 0 over ``mesh``."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    for owner in module.modules():
        for name, param in list(owner._parameters.items()):
            if param is None or isinstance(param, DTensor):
                continue
            if param not in made:
                chunk = -(-param.shape[0] // num_ranks)
                start = min(rank * chunk, param.shape[0])
                own = param.detach()[start : start + chunk].clone()
                shape, stride = param.shape, param.stride()
                whole = dtensor_over(own, mesh, [Shard(0)], shape, stride)
                made[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
            setattr(owner, name, made[param])


def _check_not_distributed(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in module.named_parameters():
        if not isinstance(param, DTensor):
            continue
        if param.device_mesh != mesh or tuple(param.placements) != (Shard(0),):
            raise ValueError(
                f"Parameter '{name}' of shard_experts is a DTensor over {param.device_mesh} with "
                f"placements {tuple(param.placements)}: experts are distributed whole, so leave "
                "them out of what makes the model tensor-parallel"
            )


def _connect_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Make backward run through the experts on every rank, even without tokens: the ranks that
    share the parameters must gather them and reduce their gradients together."""
    if not torch.is_grad_enabled() or not isinstance(output, Tensor):
        return output
    anchors: list[Tensor] = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    if not anchors:
        anchors += [p for p in module.parameters() if p.requires_grad][:1]
    return _Connected.apply(output, *anchors) if anchors else output


def local_experts(parameter: Tensor) -> Tensor:
    """This rank's experts: (num_local, ...) of a parameter (num_experts, ...), differentiable.

    Without `shard_experts`, returns all experts.

    Example:
        >>> def forward(self, rows, counts):
        ...     pairs = zip(rows.split(counts), local_experts(self.weight), strict=True)
        ...     return torch.cat([part @ weight for part, weight in pairs])
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# -- tokens --------------------------------------------------------------------------------------


class PlannedRouting:
    """Stands for the ranks of experts in a traced step, which has shapes and no values.

    It assumes that tokens are spread evenly over experts, and sends nothing.

    Args:
        ranks: number of ranks over which experts are distributed.
        record: called with the bytes that a rank sends in each exchange, also to itself.
    """

    def __init__(self, ranks: int, record: Callable[[int], None]) -> None:
        self.ranks = ranks
        self.record = record
        self.num_exchanges = 0  # `TokenExchange` objects made


_planned: PlannedRouting | None = None


@contextmanager
def planned_routing(routing: PlannedRouting) -> Iterator[None]:
    """Context in which every `TokenExchange` uses ``routing`` and not its mesh."""
    global _planned
    before, _planned = _planned, routing
    try:
        yield
    finally:
        _planned = before


class TokenExchange:
    """Sends the tokens of one batch to the ranks of their experts, and the results back.

    Construct it on all ranks of ``mesh``: this exchanges counts in a small all-to-all. `dispatch`
    and `combine` each do one all-to-all, and another one in backward. All ranks must call them,
    even if they send or receive no tokens. No token is dropped or padded: a rank's memory grows
    with the number of tokens that its experts get.

    The host needs the message sizes. On a GPU, this costs one synchronization.

    Args:
        expert_ids: (num_tokens, choices per token) integers, 0 to ``num_experts`` - 1.
        num_experts: total over all ranks; distributed over ``mesh`` as by `shard_experts`.
        mesh: 1-D, the ranks over which experts are distributed. None: this rank has all experts.

    Attributes:
        counts: the number of rows for each expert of this rank.

    Raises:
        ValueError: for a ``mesh`` of several dims, or ``expert_ids`` that are not 2-D.

    Example:
        >>> exchange = TokenExchange(torch.tensor([[0], [1], [0]]), num_experts=2)
        >>> exchange.counts
        [2, 1]
        >>> rows = exchange.dispatch(torch.eye(3))  # grouped by expert
        >>> torch.equal(exchange.combine(rows), torch.eye(3))
        True
    """

    def __init__(
        self, expert_ids: Tensor, num_experts: int, mesh: DeviceMesh | None = None
    ) -> None:
        if expert_ids.ndim != 2:
            shape = tuple(expert_ids.shape)
            raise ValueError(f"expert_ids must be (tokens, choices), got shape {shape}")
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"TokenExchange needs a mesh of one dim, like mesh['ep'], got {mesh}")
        self.num_tokens, self.num_choices = expert_ids.shape
        self._rows: Tensor | None = None
        self._group: Any
        if _planned is not None:
            self._spread(expert_ids.flatten(), num_experts, _planned)
            return
        self._group = None if mesh is None or mesh.size() == 1 else mesh.get_group()
        num_ranks = 1 if mesh is None else mesh.size()
        rank = 0 if mesh is None else mesh.get_local_rank()
        chunk = -(-num_experts // num_ranks)
        num_local = max(0, min(chunk, num_experts - rank * chunk))
        ids = expert_ids.flatten()
        # Sent row i is choice `order[i]`: sorted by expert, and therefore by rank too.
        self._order = torch.argsort(ids, stable=True)
        sent = torch.bincount(ids, minlength=num_ranks * chunk).view(num_ranks, chunk)
        received = sent
        if self._group is not None:
            received = torch.empty_like(sent)
            _exchange(received, sent, self._group)
        both = torch.stack([sent, received]).cpu()
        self._sends: list[int] = both[0].sum(1).tolist()
        self._receives: list[int] = both[1].sum(1).tolist()
        self.counts: list[int] = both[1].sum(0).tolist()[:num_local]
        # Rows arrive in the order of ranks, and of experts within a rank.
        experts = torch.arange(chunk, device=ids.device).repeat(num_ranks)
        arrived = experts.repeat_interleave(received.flatten(), output_size=sum(self._receives))
        self._grouping = torch.argsort(arrived, stable=True)

    def _spread(self, ids: Tensor, num_experts: int, planned: PlannedRouting) -> None:
        """The rows of the first rank, which has the most experts, if all get as many tokens."""
        planned.num_exchanges += 1
        self._group = planned if planned.ranks > 1 else None
        num_local = -(-num_experts // planned.ranks)
        received = ids.numel() * planned.ranks * num_local // num_experts
        self._order = torch.argsort(ids, stable=True)
        self._grouping = torch.argsort(ids.new_empty(received), stable=True)
        self._sends, self._receives = [ids.numel()], [received]
        ends = [received * i // num_local for i in range(num_local + 1)]
        self.counts = [stop - start for start, stop in pairwise(ends)]

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Send tokens to their experts.

        Args:
            tokens: (num_tokens, dim), of any dtype that the backend supports.

        Returns:
            (sum of ``counts``, dim): the rows for this rank's experts, grouped by expert.
        """
        rows = tokens[self._order // self.num_choices]
        rows = self._exchange(rows, self._sends, self._receives)
        self._rows = rows
        return rows[self._grouping]

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Send the experts' outputs for the rows of `dispatch` back to the ranks of the tokens.

        Args:
            rows: (sum of ``counts``, any dim), in the order of `dispatch`.
            weights: (num_tokens, choices per token); None: ones.

        Returns:
            (num_tokens, dim): for each token, the weighted sum over its choices.
        """
        if self._rows is not None and torch.is_grad_enabled():
            # So that the backward of `dispatch` runs on every rank.
            rows, self._rows = _Connected.apply(rows, self._rows), None
        back = torch.empty_like(rows).index_copy(0, self._grouping, rows)
        back = self._exchange(back, self._receives, self._sends)
        choices = torch.empty_like(back).index_copy(0, self._order, back)
        choices = choices.view(self.num_tokens, self.num_choices, back.shape[-1])
        if weights is not None:
            choices = choices * weights.unsqueeze(-1)
        return choices.sum(1)

    def _exchange(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        if self._group is None:
            return rows
        return _AllToAll.apply(rows, sends, receives, self._group)


class _Connected(torch.autograd.Function):
    """Identity on ``output`` with edges to ``anchors``, so that their backward runs too, without
    a gradient, whatever ``output`` depends on."""

    @staticmethod
    @override
    def forward(ctx: Any, output: Tensor, *anchors: Tensor) -> Tensor:
        ctx.num_anchors = len(anchors)
        return output.view_as(output)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.num_anchors


class _AllToAll(torch.autograd.Function):
    """Sends rows to other ranks; backward sends the rows' gradients back."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        sends: list[int],
        receives: list[int],
        group: dist.ProcessGroup | PlannedRouting,
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor,
    sends: list[int],
    receives: list[int],
    group: dist.ProcessGroup | PlannedRouting,
) -> Tensor:
    out = rows.new_empty((sum(receives), *rows.shape[1:]))
    _exchange(out, rows.contiguous(), group, receives, sends)
    return out


def _exchange(
    out: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | PlannedRouting,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> None:
    if isinstance(group, PlannedRouting):
        group.record(sent.nbytes)
        return
    try:
        dist.all_to_all_single(out, sent, receives, sends, group=group)
    except RuntimeError as error:
        reraise(error, "the exchange of tokens between experts (TokenExchange)", group)
