"""Tensor subclasses: the tensors that they consist of, and which of these follow their rows.

A wrapper subclass has no memory itself. Its inner tensors (``_data``, ``int_data``, ``scale``) are
attributes, in the same ``__dict__`` as attributes that users attach to a parameter. So the two must
be distinguished before anything is copied from one form of a parameter to another.

An inner tensor may have a row for each row of the shard (codes) or for a block of rows (scales). It
may also be the same for all rows (a table). Only the class can decide this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .parts import local_part


def is_subclass(tensor: Tensor) -> bool:
    """Whether this rank's part consists of inner tensors."""
    local = local_part(tensor)
    return is_wrapper(local)


def inner_of(local: Tensor) -> dict[str, Tensor]:
    """The inner tensors by name; for nested subclasses, by path."""
    return dict(_inner(local, ""))


def _inner(local: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in cast(Any, local).__tensor_flatten__()[0]:
        value = getattr(local, name)
        if is_subclass(value):
            yield from _inner(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value.detach()


def kind_of(local: Tensor) -> str:
    """The name of its class."""
    return f"{type(local).__module__}.{type(local).__qualname__}"


def follows_rows(
    local: Tensor, inner: dict[str, Tensor], fewer: Tensor | None
) -> dict[str, bool | None]:
    """Which inner tensors have a part for each row, by name (None: the class does not show it).

    Args:
        inner: the inner tensors of ``local``.
        fewer: the same tensor with fewer rows; inner tensors that follow are shorter there.
    """
    rows = local.shape[0] if local.ndim else 0
    others = {} if fewer is None else inner_of(fewer)
    found: dict[str, bool | None] = {}
    for name, before in inner.items():
        other = others.get(name)
        if local.ndim and not before.ndim:
            found[name] = False  # one number, even if the class omits it when it is split
        elif fewer is None:
            found[name] = True if before.shape == local.shape else None
        elif other is None:
            found[name] = None
        elif other.shape == before.shape:
            found[name] = False
        else:
            in_proportion = other.ndim and other.shape[0] * rows == before.shape[0] * fewer.shape[0]
            found[name] = True if in_proportion else None
    return found


def fewer_rows(local: Tensor) -> Tensor | None:
    """The first rows of ``local``, as its class splits it; None if the class refuses."""
    rows = local.shape[0] if local.ndim else 0
    # Blocks of rows mostly are powers of two.
    powers = [1 << i for i in reversed(range(rows.bit_length()))]
    candidates = [*(rows // 2**i for i in range(1, 5)), *powers]
    with torch.no_grad():
        for num in candidates:
            if not 0 < num < rows:
                continue
            for cut in (lambda n: local.narrow(0, 0, n), lambda n: torch.split(local, n)[0]):
                # Classes reject parts that do not end at a block, each with different errors.
                with suppress(Exception):
                    made = cut(num)
                    if type(made) is type(local) and made.shape[0] == num:
                        return made
    return None


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` consists of inner tensors, which ``__tensor_flatten__`` names."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def dispatches(tensor: Tensor) -> bool:
    """Whether the class of ``tensor`` runs operators itself: it may be a wrapper of any kind."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def user_attributes(original: Tensor) -> dict[str, Any]:
    """Attributes that a user attached to a parameter (``param.sequence_parallel = True``)."""
    attached = dict(vars(original))
    # An attribute that ``detach`` also gives the new object was put there by its class: an inner
    # tensor, or how to read it. Copied to another form of the parameter it would be stale: that
    # form would keep showing these weights.
    if dispatches(original) and not isinstance(original, DTensor):
        with torch.no_grad():
            made_by_class = vars(original.detach())
        attached = {name: v for name, v in attached.items() if name not in made_by_class}
        attached.pop("_is_param", None)  # set by `nn.Parameter`, on subclasses only
    return attached


def attach_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Give ``tensor`` a user's ``attributes``, except where its class has one of that name."""
    own = vars(tensor)
    for name, value in attributes.items():
        if name not in own:
            own[name] = value


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that ``tensor`` consists of; itself unless it is a wrapper."""
    return list(_leaves(tensor))


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, DTensor):
        yield from _leaves(tensor._local_tensor)
        return
    inner = tensor_attributes(tensor) if dispatches(tensor) else {}
    if not inner:
        yield tensor
    for value in inner.values():
        yield from _leaves(value)


def tensor_attributes(tensor: Tensor) -> dict[str, Tensor]:
    """Attributes that are tensors, and those that ``__tensor_flatten__`` names."""
    # Each alone misses some: ``__slots__`` are not in ``vars``, and classes without the protocol,
    # or with a cache that it does not name, have their tensors in ``vars`` only.
    named = tensor.__tensor_flatten__()[0] if is_wrapper(tensor) else ()  # type: ignore[attr-defined]
    found = {name: getattr(tensor, name) for name in named}
    found.update((n, v) for n, v in vars(tensor).items() if isinstance(v, Tensor))
    return found


def plain_gradient(grad: Tensor, name: str, *, check: bool) -> Tensor:
    """The values of a gradient that is a wrapper subclass, which reductions can send.

    Args:
        name: of the parameter.
        check: whether to make sure that it is one gradient; the host waits for the device.

    Raises:
        NotImplementedError: if it consists of several tensors of its shape that differ.
    """
    if check:
        alike = [t for t in inner_tensors(grad) if t.shape == grad.shape and t.dtype == grad.dtype]
        if any(not torch.equal(alike[0], other) for other in alike[1:]):
            raise NotImplementedError(
                f"The gradient of parameter '{name}' is a {type(grad).__name__} of {len(alike)} "
                "different tensors. One gradient is reduced per parameter, so the others would be "
                "lost: let the operators of the class give a plain gradient, or register the inner "
                "tensors as separate parameters"
            )
    plain = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    plain.copy_(grad)
    return plain


def copy_of(tensor: Tensor) -> Tensor:
    """The same values in other memory."""
    # ``clone`` may compute: NF4's quantizes once more, and changes the weights by that.
    made = tensor.new_zeros(tensor.shape)
    made.copy_(tensor)
    return made
