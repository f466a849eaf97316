"""Checks of arguments that several public functions take."""

from __future__ import annotations


def check_bytes(name: str, value: object, *, kinds: str = "an int (bytes)") -> None:
    """Check a number of bytes, which may be 0.

    Args:
        name: of the argument, for messages.
        kinds: what it may be.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {kinds}, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
