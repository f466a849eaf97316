"""Random module trees: any nesting, ties, reuse, shapes and containers."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from draws import Draw, one, several

# What a layer computes with; all take and return tensors of shape (batch, WIDTH).
KINDS = (
    "linear",  # a weight and perhaps a bias of any size
    "norm",  # a module without units inside
    "scalar",  # a 0-dim parameter
    "deep",  # a 5-dim parameter
    "table",  # an embedding, of which few rows are used
    "empty",  # a parameter without elements
    "batchnorm",  # buffers that training changes
    "nothing",  # no parameters
    "float32",  # another dtype than the rest
    "saves",  # a function of the user's, which saves its weight for backward
    "keeps",  # one that keeps it as an attribute, which no hook of autograd sees
    "parts",  # a weight that is used in parts
    "same module",  # that of an earlier layer, which has two names then
    "same weight",  # the parameter of an earlier layer in a module of its own
)
WIDTH = 3
SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 13)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module: something of its own, and modules inside it that are called one after another.

    ``unit`` says how it is sharded on its own, if at all, ``reshard`` its reshard_after_forward,
    ``container`` what holds the modules inside, ``repeats`` how often its body is called in a
    forward, ``recomputed`` whether and how the body is checkpointed, ``skipped`` in which steps
    (even: 0, odd: 1) it does nothing, ``frozen`` whether its own parameters are trained, ``passes``
    how it is called and what it returns, ``detached`` whether its body builds no graph, ``writes``
    what is changed in place: its input by itself, or its output by the caller.
    """

    kind: str
    size: int = 4
    bias: bool = True
    unit: str = ""
    reshard: bool | int | None = None
    container: str = "list"
    repeats: int = 1
    recomputed: bool | str = False
    skipped: int | None = None
    frozen: bool = False
    passes: str = "tensor"
    detached: bool = False
    writes: str = ""
    inside: tuple[Layer, ...] = ()


class Own(nn.Module):
    """The part of a layer that has the parameters."""

    def __init__(self, layer: Layer, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.kind, size = layer.kind, layer.size
        if weight is not None:
            self.weight = weight
        elif self.kind in ("linear", "float32", *FUNCTIONS):
            self.weight = nn.Parameter(torch.randn(size, WIDTH) / 2)
            if layer.bias:
                self.bias = nn.Parameter(torch.randn(size) / 2)
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif self.kind == "scalar":
            self.scale = nn.Parameter(torch.randn(()))
        elif self.kind == "deep":
            self.weight = nn.Parameter(torch.randn(size, 1, WIDTH, 1, 2) / 2)
        elif self.kind == "table":
            self.table = nn.Embedding(size, WIDTH)
        elif self.kind == "empty":
            self.weight = nn.Parameter(torch.randn(0, WIDTH))
        elif self.kind == "batchnorm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if self.kind == "float32":
            self.keeps_dtype = True

    def forward(self, x: Tensor, step: int) -> Tensor:
        # A small step each: where gradients grow from layer to layer, so does rounding.
        weight = getattr(self, "weight", None)
        if self.kind in ("norm", "batchnorm"):
            return x + self.norm(x) / 8
        if self.kind == "scalar":
            return x * (1 + self.scale / 8)
        if self.kind == "table":
            rows = torch.arange(x.shape[0]) * (step + 1) % self.table.num_embeddings
            return x + self.table(rows) / 8
        if weight is None:
            return x.tanh() + x / 2
        if weight.numel() == 0:
            return x + weight.sum()
        if self.kind in FUNCTIONS:
            return x + FUNCTIONS[self.kind](x.tanh(), weight) / 8
        flat = weight.flatten(1).unflatten(1, (WIDTH, -1)).sum(-1)
        bias = getattr(self, "bias", None)
        hidden = nn.functional.linear(x.to(flat.dtype), flat, bias).tanh()
        return x + (hidden @ flat).to(x.dtype) / 8


class Saves(torch.autograd.Function):
    """``x`` times the weight and back, as kernels of the user's: the weight is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients(x, weight, grads[0])


class Keeps(torch.autograd.Function):
    """The same, with the parameter itself at hand in backward, as kernels that accumulate have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t() @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradients(x, ctx.weight, grads[0])


def gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``x @ weight.t() @ weight``."""
    hidden, hidden_grad = x @ weight.t(), grad @ weight.t()
    return hidden_grad @ weight, hidden_grad.t() @ x + hidden.t() @ grad


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """The same, in two halves of the weight."""
    middle = weight.shape[0] // 2
    return sum((x @ part.t() @ part for part in (weight[:middle], weight[middle:])), 0 * x)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saves": Saves.apply,
    "keeps": Keeps.apply,
    "parts": in_parts,
}


class Node(nn.Module):
    """A `Layer` as a module."""

    def __init__(self, layer: Layer, earlier: list[Own]) -> None:
        super().__init__()
        self.layer = layer
        # (A module with two names whose weight is tied, too, is refused in some places.)
        linear = [own for own in earlier if own.kind == "linear"]
        tied = [getattr(own, "weight", None) for own in earlier if own.kind == "same weight"]
        again = [own for own in linear if not any(own.weight is weight for weight in tied)]
        single = [own for own in linear if earlier.count(own) == 1]
        if layer.kind == "same module" and again:
            self.own = again[layer.size % len(again)]
        elif layer.kind == "same weight" and single:
            self.own = Own(layer, single[layer.size % len(single)].weight)
        else:
            self.own = Own(layer)
            self.own.requires_grad_(not layer.frozen)
        earlier.append(self.own)
        inside = [Node(inner, earlier) for inner in layer.inside]
        if layer.container == "dict":
            self.inside: nn.Module = nn.ModuleDict({f"m{i}": m for i, m in enumerate(inside)})
        else:
            self.inside = nn.ModuleList(inside)
        self.fault = ""
        self.absent = False  # on this rank, for now
        self.input_dtype: torch.dtype | None = None  # what mixed precision makes of inputs

    def parts(self) -> Iterator[Node]:
        for module in self.inside.children():
            assert isinstance(module, Node)
            yield module

    def body(self, x: Tensor, step: int) -> Tensor:
        x = self.own(x, step)
        for module in self.parts():
            x = module.called(x, step)
        return x

    def called(self, x: Tensor, step: int) -> Tensor:
        """The output of a call in the way of this layer."""
        if self.layer.passes == "keyword":
            result = tensor_of(self(step=step, x=x))
        elif self.layer.passes == "nested":
            result = tensor_of(self({"x": [x]}, step))
        else:
            result = tensor_of(self(x, step))
        return result.mul_(0.75) if self.layer.writes == "output" else result

    def encode(self, x: Tensor, step: int) -> Tensor:
        """Another way in, for `fsdp2.register_fsdp_forward_method`."""
        return 2 * self.body(x, step)

    def forward(self, x: Any, step: int) -> Any:
        result = self.output(tensor_of(x), step)
        return {"x": [result]} if self.layer.passes == "nested" else result

    def output(self, x: Tensor, step: int) -> Tensor:
        assert self.input_dtype in (None, x.dtype)
        if self.layer.writes == "input":
            x = x.mul_(0.75)
        if self.layer.skipped == step % 2 or self.absent:
            return x
        x = Faulty.apply(x, self, "late in backward")
        raise_if(self, "before forward")
        for _ in range(self.layer.repeats):
            if self.layer.detached:
                with torch.no_grad():
                    result = self.body(x, step)
                x = x + result / 8
            elif self.layer.recomputed:
                x = self.checkpointed(x, step)
            else:
                x = self.body(x, step)
        raise_if(self, "after forward")
        return Faulty.apply(x, self, "early in backward")

    def checkpointed(self, x: Tensor, step: int) -> Tensor:
        """The body, recomputed in backward."""
        how: dict[str, Any] = {"use_reentrant": self.layer.recomputed == "reentrant"}
        if self.layer.recomputed == "selective":
            kept = [torch.ops.aten.mm.default, torch.ops.aten.tanh.default]
            how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
        result = checkpoint(self.body, x, step, **how)
        assert isinstance(result, Tensor)
        return result


def tensor_of(value: Any) -> Tensor:
    """What a layer takes or returns, without what is around it."""
    return value["x"][0] if isinstance(value, dict) else value


class PlannedError(Exception):
    """What programs raise."""


def raise_if(node: Node, place: str) -> None:
    fault, _, kind = node.fault.partition("/")
    if fault == place:
        raise KeyboardInterrupt if kind == "interrupt" else PlannedError(place)


class Faulty(torch.autograd.Function):
    """The identity; its backward raises where the node has this fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: Node, place: str) -> Tensor:
        ctx.node, ctx.place = node, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        raise_if(ctx.node, ctx.place)
        return grads[0], None, None


FAULTS = ("before forward", "after forward", "early in backward", "late in backward")
# In hooks of the user's, on a node.
HOOK_FAULTS = ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook")


def add_faulty_hook(node: Node, place: str) -> RemovableHandle:
    """Registers the hook of `HOOK_FAULTS` that raises what `node.fault` says."""
    register = {
        "forward pre-hook": node.register_forward_pre_hook,
        "forward hook": node.register_forward_hook,
        "backward pre-hook": node.register_full_backward_pre_hook,
        "backward hook": node.register_full_backward_hook,
    }
    return register[place](lambda *_: raise_if(node, place))


def build(layer: Layer) -> Node:
    """The model in fp64, but for the modules that keep their dtype."""
    model = Node(layer, [])
    for module in model.modules():
        if isinstance(module, Own) and not hasattr(module, "keeps_dtype"):
            module.double()
    return model


def nodes(model: nn.Module) -> list[Node]:
    """All nodes below the root, inner ones first."""
    found = [module for module in model.modules() if isinstance(module, Node)]
    return found[:0:-1]


def all_layers(layer: Layer) -> Iterator[Layer]:
    """``layer`` and those inside it."""
    yield layer
    for inner in layer.inside:
        yield from all_layers(inner)


def style(chance: random.Random) -> dict[str, Draw[Any]]:
    """How the layers of one model are drawn.

    Half of the attributes keep to one or two of their values: what needs three layers of the same
    rare kind, or none of the usual ones, happens in some models then instead of in hardly any.
    """
    choices: dict[str, tuple[Any, ...]] = {
        "kind": ("linear", "linear", *KINDS),
        "size": SIZES,
        "bias": (True, False),
        "unit": ("", "sharded", "sharded", "replicated", "with the next"),
        "reshard": (None, True, False, 1, 2),
        "container": ("list", "dict"),
        "repeats": (1, 1, 1, 2),
        "recomputed": (*[False] * 4, True, True, "reentrant", "selective"),
        "skipped": (None, None, None, 0, 1),
        "frozen": (False, False, True),
        "passes": ("tensor", "tensor", "keyword", "nested"),
        "detached": (*[False] * 7, True),
        "writes": (*[""] * 6, "input", "output"),
    }
    found = {}
    for name, values in choices.items():
        if chance.random() < 0.5:
            values = tuple(chance.choice(values) for _ in range(chance.randint(1, 2)))
        found[name] = one(*values)
    return found


def layers(depth: int, style: dict[str, Draw[Any]]) -> Draw[Layer]:
    """A layer with up to three inside, and so on, so deep."""

    def draw(chance: random.Random) -> Layer:
        inside = several(layers(depth - 1, style), 0, 3)(chance) if depth else ()
        return Layer(inside=inside, **{name: each(chance) for name, each in style.items()})

    return draw
