"""Replaces methods of single objects for a while."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """The replaced methods and attributes, and their originals. Classes are never modified."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`; a method that replaces another calls that one itself."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = value

    def undo(self) -> None:
        """Restore all originals; may be called again."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
