"""Programs over a chain of layers that are merged into one unit: what is run in a step.

Each is a step of forward and backward that does something else with the layers in the middle, and
returns its results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gathers import bytes_held
from merged_chain import NUM, loss_and_backward, outputs, patched, plain

CALLS = ((1, 0), (3, 2), (5, 4), (1, 3), (0, 1))  # of one layer inside another


def loss_of_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    loss = model(x, outputs)[4].square().mean()
    loss.backward()
    return [loss]


def losses_of_the_middle_and_of_the_end(model: Any, x: Tensor) -> list[Tensor]:
    found = model(x, outputs)
    losses = [found[i].square().mean() for i in (3, 5, -1)]
    for loss in losses:
        loss.backward(retain_graph=True)
    return losses


def the_middle_last(model: Any, x: Tensor) -> list[Tensor]:
    found = model(x, outputs)
    losses = [found[i].square().mean() for i in (-1, 4)]
    for loss in losses:
        loss.backward(retain_graph=True)
    return losses


def several_forwards(model: Any, x: Tensor) -> list[Tensor]:
    found = [model(x + i, outputs) for i in range(3)]
    losses = [found[0][-1].mean(), found[2][4].square().mean(), found[1][-1].square().mean()]
    for loss in losses:
        loss.backward()
    return losses


def a_graph_that_is_dropped(model: Any, x: Tensor) -> list[Tensor]:
    kept = model(x, outputs)[3]
    return [kept, *plain(model, x), *loss_and_backward(kept)]


def recomputed(some: range, *, reentrant: bool) -> Callable[[Any, Tensor], list[Tensor]]:
    """Activation checkpointing of some layers, each by itself."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x).tanh()
        for i, layer in enumerate(model.layers):
            x = checkpoint(layer, x, use_reentrant=reentrant) if i in some else layer(x)
            x = x.tanh()
        return model.after(x)

    return lambda model, x: loss_and_backward(model(x, body))


def recomputed_together(model: Any, x: Tensor) -> list[Tensor]:
    def some(x: Tensor) -> Tensor:
        for layer in model.layers[1:4]:
            x = layer(x).tanh()
        return x

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.layers[0](model.before(x)).tanh()
        x = checkpoint(some, x, use_reentrant=False)
        return model.after(model.layers[5](model.layers[4](x).tanh()))

    return loss_and_backward(model(x, body))


def around(model: Any, x: Tensor) -> list[Tensor]:
    """Connections around layers, into and out of the unit."""

    def body(model: Any, x: Tensor) -> Tensor:
        first = model.before(x)
        found = [first]
        for layer in model.layers:
            found.append(found[-1] + layer(found[-1] + first).tanh())
        return model.after(found[-1] + found[2] * first) + found[3]

    return loss_and_backward(model(x, body))


def branches(model: Any, x: Tensor) -> list[Tensor]:
    """Layers beside each other, whose gradients come in an order of autograd's own."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        found = [layer(x * i) for i, layer in enumerate(model.layers)]
        return model.after(found[0].tanh().exp().sin() + found[3] * found[5]) + found[1].cos()

    return loss_and_backward(model(x, body))


def in_parts(model: Any, x: Tensor) -> list[Tensor]:
    """A graph that is cut in the middle, and backward by hand through the parts."""

    def body(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle = x = model.before(x)
        cut = x
        for i, layer in enumerate(model.layers):
            if i == 3:
                middle, cut = x, x.detach().requires_grad_()
                x = cut
            x = layer(x).tanh()
        return middle, cut, model.after(x)

    middle, cut, end = model(x, body)
    loss = end.square().mean()
    loss.backward()
    middle.backward(cut.grad)
    return [loss, cut.grad]


def reordered(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i in (2, 0, 0, 4, 5):
            x = model.layers[i](x).tanh()
        return model.layers[1](model.after(x))

    return loss_and_backward(model(x, body))


def left_in_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for layer in model.layers[:3]:
            x = layer(x).tanh()
        return x

    return loss_and_backward(model(x, body))


def no_grad_in_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            with torch.set_grad_enabled(i not in (2, 3)):
                x = x + layer(x).tanh()
        return model.after(x)

    return loss_and_backward(model(x, body))


def grad_in_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate((model.before, *model.layers, model.after)):
            with torch.set_grad_enabled(i > 3):
                x = x + layer(x).tanh()
        return x

    return loss_and_backward(model(x, body))


def evaluated(model: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        first = model.eval()(x, outputs)[-1]
        second = model(x, outputs)[-1]
    return [first, second, *plain(model.train(), x)]


def called_alone(model: Any, x: Tensor) -> list[Tensor]:
    """Modules of the middle, outside of any forward of the model."""
    with torch.no_grad():
        found = [model.layers[2](x), model.layers[4](x)]
    assert not bytes_held(model)
    found += loss_and_backward(model.layers[3](x))
    return [*found, *plain(model, x), model.layers[3](x).detach()]


def raised(model: Any, x: Tensor) -> list[Tensor]:
    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    handle = model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(x, outputs)
    handle.remove()
    return plain(model, x)


def raised_and_gone_on(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            if i == 3:
                with pytest.raises(RuntimeError):
                    layer(x[:, :2])
            x = layer(x).tanh()
        return model.after(x)

    return loss_and_backward(model(x, body))


def backward_raised(model: Any, x: Tensor) -> list[Tensor]:
    """In the middle of the unit; then backward begins there, with no forward between.

    Not at outputs of the model, where the root's hooks would be the first to hear of it.
    """
    found: list[Tensor] = []

    def fail(_: Tensor) -> None:
        raise ValueError("in the middle")

    def body(model: Any, x: Tensor) -> Tensor:
        found.extend(outputs(model, x))
        return found[-1]

    loss = model(x, body).square().mean()
    handle = found[2].register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward(retain_graph=True)
    handle.remove()
    return loss_and_backward(found[4])


def backward_inside(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            x = layer(x).tanh()
            if i == 3:
                (inner,) = torch.autograd.grad(x.sum(), model_input, retain_graph=True)
        return model.after(x), inner

    model_input = x.requires_grad_()
    found, inner = model(x, body)
    return [inner, *loss_and_backward(found)]


def penalty_on_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    """A second backward that begins in the middle, when units have been freed."""
    between: list[Tensor] = []

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for layer in model.layers:
            x = layer(x).sin()
            between.append(x)
            x = x * 2
            between.append(x)
        return model.after(x)

    loss = model(x, body).square().mean()
    grads = torch.autograd.grad(loss, [between[4], between[7]], create_graph=True)
    with torch.no_grad():
        model(x, outputs)
    penalty = sum(grad.square().sum() for grad in grads)
    assert isinstance(penalty, Tensor)
    penalty.backward()
    return [*grads, penalty]


def penalty_where_gradients_begin(model: Any, x: Tensor) -> list[Tensor]:
    """The same of layers after others that ran under `no_grad`."""

    def body(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = model.layers[1](model.layers[0](model.before(x)))
        x = start = x.detach().requires_grad_() * 2
        for layer in model.layers[2:]:
            x = layer(x).sin()
        return start, model.after(x)

    start, end = model(x, body)
    (grad,) = torch.autograd.grad(end.square().mean(), [start], create_graph=True)
    with torch.no_grad():
        model(x, outputs)
    return [grad, *loss_and_backward(grad)]


def with_other_weights(model: Any, x: Tensor) -> list[Tensor]:
    """`functional_call` of a module in the middle."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            given = {name: param.detach() * 2 for name, param in shards[3].items()}
            x = functional_call(layer, given, (x,)) if i == 3 else layer(x)
        return model.after(x)

    shards = [dict(layer.named_parameters()) for layer in model.layers]
    return loss_and_backward(model(x, body))


def transformed(model: Any, x: Tensor) -> list[Tensor]:
    """Layers of the middle under ``vmap``, where hooks on tensors would be lost."""

    def body(model: Any, x: Tensor) -> list[Tensor]:
        found = [model.before(x)]
        for i, layer in enumerate(model.layers):
            found.append((vmap(layer) if i in (2, 3) else layer)(found[-1]).tanh())
        return [*found, model.after(found[-1])]

    return loss_and_backward(model(x, body)[4]) + loss_and_backward(model(x, body)[-1])


def in_place(model: Any, x: Tensor) -> list[Tensor]:
    """Outputs that are views, changed in place, with hooks of the user."""
    seen: list[Tensor] = []

    def body(model: Any, x: Tensor) -> list[Tensor]:
        found = [model.before(x)[:, None]]
        view = partial(torch.Tensor.view, size=(-1, 1, 6))
        for i, layer in enumerate(model.layers):
            with patched(layer, lambda x, layer=layer: view(type(layer).forward(layer, x))):
                y = layer(found[-1])
            y.mul_(2)
            if i == 2:
                y.register_hook(lambda grad: seen.append(grad.clone()))
                y.retain_grad()
            found.append(y.tanh())
        return [*found, model.after(found[-1])]

    found = model(x, body)
    results = loss_and_backward(found[4])
    assert len(seen) == 1
    results += loss_and_backward(model(x, body)[-1])
    assert len(seen) == 2
    return results + seen


def gradients_of_inputs(model: Any, x: Tensor) -> list[Tensor]:
    """``autograd.grad`` through a part of the unit, which accumulates nothing."""
    found = model(x, outputs)
    grads = torch.autograd.grad(found[5].square().sum(), [found[2]], retain_graph=True)
    return [*grads, *loss_and_backward(found[-1])]


def with_keywords(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> list[Tensor]:
        found = [model.before(x)]
        for layer in model.layers:
            found.append(layer(input=found[-1]).tanh())
        return [*found, model.after(found[-1])]

    return loss_and_backward(model(x, body)[3]) + loss_and_backward(model(x, body)[-1])


def reused(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i in (0, 1, 2, 2, 1, 3, 0, 4):
            x = model.layers[i](x).tanh()
        return model.after(x)

    return loss_and_backward(model(x, body))


def calling(inner: int, outer: int) -> Callable[[Any, Tensor], list[Tensor]]:
    """A layer calls another one of the unit in its forward, between two uses of its weight."""

    def body(model: Any, x: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            x = model.layers[inner](linear(x, layer.weight).tanh())
            return linear(x, layer.weight, layer.bias)

        layer = model.layers[outer]
        x = model.before(x)
        with patched(layer, forward):
            for i, each in enumerate(model.layers):
                x = x if i == inner else each(x).tanh()
        return model.after(x)

    return lambda model, x: loss_and_backward(model(x, body))


def gradients_turned_on(model: Any, x: Tensor) -> list[Tensor]:
    """A module turns them on, and leaves them so."""

    def forward(x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return linear(linear(x, layer.weight).tanh(), layer.weight, layer.bias)

    def body(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad(), patched(layer, forward):
            x = model.before(x)
            for each in model.layers:
                x = each(x).tanh()
            return model.after(x)

    layer = model.layers[2]
    return loss_and_backward(model(x, body))


def resharded_in_forward(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for layer in model.layers:
            x = layer(x).tanh()
            layer.reshard()
        return model.after(x)

    return loss_and_backward(model(x, body))


def resharded_in_backward(model: Any, x: Tensor) -> list[Tensor]:
    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for layer in model.layers:
            x = layer(x).tanh()
            if x.requires_grad:
                x.register_hook(lambda _, layer=layer: layer.reshard())
        return model.after(x)

    return loss_and_backward(model(x, body))


def gathered_anew_in_the_middle(model: Any, x: Tensor) -> list[Tensor]:
    """As a pipeline does between micro-batches: freed, then asked for again, without a wait."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            x = layer(x).tanh()
            if i == 2:
                layer.reshard()
                model.set_reshard_after_backward(False)
        return model.after(x)

    model.set_is_last_backward(False)
    earlier = model(x, outputs)[-1]
    found = model(x * 2, body)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    return loss_and_backward(found) + loss_and_backward(earlier)


def saved_in_vain(model: Any, x: Tensor) -> list[Tensor]:
    """A state dict that raises between two layers leaves sharded parameters in the modules."""

    def fail(*_: Any) -> None:
        raise ValueError("not saved")

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            x = layer(x).tanh()
            if i == 2:
                with pytest.raises(ValueError, match="not saved"):
                    model.layers[4].state_dict()
        return model.after(x)

    handle = model.layers[4].register_state_dict_pre_hook(fail)
    found = model(x, body)
    handle.remove()
    return loss_and_backward(found)


def with_hooks_of_the_user(model: Any, x: Tensor) -> list[Tensor]:
    first, second, third = model.layers[1:4]
    handles = [
        first.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        first.register_forward_hook(lambda _, __, output: output.sin()),
        second.register_forward_pre_hook(lambda _, args: (args[0] * 3,), prepend=True),
        second.register_forward_hook(lambda _, __, output: output.cos(), prepend=True),
        third.register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,)),
        third.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,)),
    ]
    found = plain(model, x) + loss_of_the_middle(model, x)
    for handle in handles:
        handle.remove()
    return found


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def other_outputs(model: Any, x: Tensor) -> list[Tensor]:
    """Layers with several outputs, inputs passed through, views, and functions of the user."""

    def body(model: Any, x: Tensor) -> dict[str, Tensor]:
        def named(x: Tensor) -> dict[str, Any]:
            y = compute[1](x)
            return {"y": y, "number": 3, "whole": y.detach().argmax(-1), "input": x, "none": None}

        def parts(x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = compute[2](x).chunk(2, -1)
            return right, left

        def in_place(x: Tensor, y: Tensor) -> Tensor:
            return compute[3](torch.cat([x, y], -1)).relu_()

        def viewed(x: Tensor) -> Tensor:
            return _Doubled.apply(compute[4](x))[:, None].view(-1, 6)

        layers = model.layers
        compute = [partial(type(layer).forward, layer) for layer in layers]
        x = layers[0](model.before(x)).tanh()
        with patched(layers[1], named), patched(layers[2], parts):
            found = layers[1](x)
            left, right = layers[2](found["y"] + found["input"])
        with patched(layers[3], in_place), patched(layers[4], viewed):
            x = layers[4](layers[3](left, y=right))
        return {"middle": found["y"], "end": model.after(layers[5](x))}

    found = model(x, body)
    return loss_and_backward(found["middle"].sin() * found["end"])


def evaluated_before_backward(model: Any, x: Tensor) -> list[Tensor]:
    found = model(x, outputs)
    with torch.inference_mode():
        model(x, outputs)
    with torch.no_grad():
        results = [model(x * 2, outputs)[-1]]
    loss = found[4].square().mean()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        results.append(model(x * 3, outputs)[-1])
    return [*results, loss, *loss_and_backward(found[-1])]


def recomputed_inside(model: Any, x: Tensor) -> list[Tensor]:
    """All of forward, and layers by themselves in it."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        for i, layer in enumerate(model.layers):
            call = partial(checkpoint, layer, use_reentrant=False) if i % 2 else layer
            x = call(x).tanh()
        return model.after(x)

    return loss_and_backward(checkpoint(model, x, body, use_reentrant=False))


def penalty_on_the_input(model: Any, x: Tensor) -> list[Tensor]:
    x.requires_grad_()
    loss = model(x, outputs)[-1].square().mean()
    (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
    (loss + grad.square().sum()).backward()
    return [loss, grad, x.grad]  # type: ignore[list-item]


def going_on(model: Any, x: Tensor) -> Tensor:
    """A forward that goes on after modules that raised."""
    x = model.before(x)
    for i, layer in enumerate(model.layers):
        if i in (1, 3):
            with pytest.raises(RuntimeError):
                layer(x[:, :2])
        else:
            x = layer(x).tanh()
    return model.after(x)


def raised_and_left_out(model: Any, x: Tensor) -> list[Tensor]:
    return loss_and_backward(model(x, going_on))


def freed_in_backward_that_went_on(model: Any, x: Tensor) -> list[Tensor]:
    """Autograd comes to the first module before it comes to one in the middle."""

    def body(model: Any, x: Tensor) -> Tensor:
        x = model.before(x)
        found = [model.layers[0](x)]
        for layer in model.layers[1:]:
            found.append(layer(x).exp())
        # The first layer's is the shortest way; the others are behind each other.
        for y in found[1:]:
            x = (x + y).sin()
        return model.after(x) + found[0]

    return loss_and_backward(model(x, body))


def micro_batches(model: Any, x: Tensor) -> list[Tensor]:
    found = []
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        found += plain(model, x * i)
        found += loss_of_the_middle(model, x - i)
    return found


PROGRAMS: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    "a middle is recomputed": recomputed(range(2, 4), reentrant=False),
    "a middle is recomputed, reentrant": recomputed(range(2, 4), reentrant=True),
    "all is recomputed, reentrant": recomputed(range(NUM), reentrant=True),
    **{f"{outer} calls {inner}": calling(inner, outer) for inner, outer in CALLS},
    **{
        program.__name__.replace("_", " "): program
        for program in (
            plain, loss_of_the_middle, losses_of_the_middle_and_of_the_end, the_middle_last,
            several_forwards, a_graph_that_is_dropped, recomputed_together, around, branches,
            in_parts, reordered, left_in_the_middle, no_grad_in_the_middle, grad_in_the_middle,
            evaluated, called_alone, raised, raised_and_gone_on, backward_raised, backward_inside,
            penalty_on_the_middle, with_other_weights, transformed, in_place, gradients_of_inputs,
            with_keywords, micro_batches, reused, gradients_turned_on, resharded_in_forward,
            resharded_in_backward, gathered_anew_in_the_middle, saved_in_vain, other_outputs,
            with_hooks_of_the_user, evaluated_before_backward, recomputed_inside,
            penalty_where_gradients_begin, penalty_on_the_input, raised_and_left_out,
            freed_in_backward_that_went_on,
        )
    },
}  # fmt: skip

# Programs that would not run, by what is special: without gradients there is nothing to look at.
UNFIT = {
    "frozen": {"called alone"},
    "frozen first": {"backward raised", "gradients of inputs"},
    # It looks at what is freed after forward.
    "kept": {"called alone"},
    "secondary": {"called alone"},
}
