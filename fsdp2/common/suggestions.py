"""Suggests the name that a misspelt one probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about the unknown ``word``; empty if no ``known`` one is similar.

    Example:
        >>> f"There is no strategy 'ful'{did_you_mean('ful', ['full', 'grad'])}"
        "There is no strategy 'ful': did you mean 'full'?"
    """
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in reversed(list(known))}
    longer = [name for name in by_lower if len(word) > 1 and name.startswith(word.lower())]
    found = longer[-1:] or get_close_matches(word.lower(), by_lower, n=1)
    return f": did you mean '{by_lower[found[0]]}'?" if found else ""
