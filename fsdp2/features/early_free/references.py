"""Counts of the references to a tensor: by views, by autograd, by Python.

The memory of a parameter may be freed before its unit is resharded if nothing but the library
refers to it. This takes three counts, since each misses some references: a view holds the
*storage*, autograd's saved variables hold the *tensor*, and ``ctx.weight = weight`` in a custom
autograd function (fused cross-entropies do that) holds the *Python object*.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch


class References(NamedTuple):
    """Counts at one moment.

    Attributes:
        storage: tensors on the same storage, and other users of it.
        tensor: C++ references to the tensor, its Python object's included.
        objects: Python references to the object.
    """

    storage: int
    tensor: int
    objects: int

    @classmethod
    def to(cls, tensor: Any, storage: torch.UntypedStorage, *, not_counting: int) -> References:
        """The references to ``tensor``, which lies in ``storage``.

        Args:
            not_counting: Python references that come and go with registration in modules.
        """
        # With the second reference to the tensor, C++ takes one reference to its Python object.
        # Counted as Python's, it would look like a user's, and no parameter that backward uses
        # would be freed.
        uses = tensor._use_count()
        objects = sys.getrefcount(tensor) - not_counting - (uses > 1)
        return cls(torch._C._storage_Use_Count(storage._cdata), uses, objects)

    def exceed(self, before: References, *, accumulates_gradient: bool) -> bool:
        """Whether there is any reference that did not exist ``before``.

        Args:
            accumulates_gradient: autograd's node that accumulates the gradient has been made
                since; it holds the tensor, and does not read it.
        """
        return (
            self.storage > before.storage
            or self.tensor > before.tensor + accumulates_gradient
            or self.objects > before.objects
        )
