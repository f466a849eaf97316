"""Parts that follow trees temporarily: `watch_ranks`, profiles, the account of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .runtime.events import TreePart, registry


@contextmanager
def observing(kind: type[TreePart]) -> Iterator[None]:
    """Context in which ``kind`` follows all trees, after all other parts: trees that already have a
    runtime, and trees that get one inside."""
    registry.tree_parts.append(kind)
    try:
        for runtime in list(registry.trees):
            is_over = runtime.root.runtime is not runtime  # a larger one has taken its units
            if not is_over and (part := kind.of(runtime)) is not None:
                runtime.add(part)
        yield
    finally:
        registry.tree_parts.remove(kind)
        for runtime in list(registry.trees):
            if (part := runtime.part(kind)) is not None:
                runtime.remove(part)
