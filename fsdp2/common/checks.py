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


def check_number(name: str, value: object, least: int = 1) -> None:
    """Check an argument that counts something.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_kind(name: str, value: object, kind: type, usual: str) -> None:
    """Check the class of an argument.

    Args:
        name: of the argument, for messages.
        usual: code that makes one.

    Raises:
        TypeError: if it is no ``kind``.
    """
    if isinstance(value, kind):
        return
    shown = value is None or isinstance(value, str | int | float)
    got = repr(value) if shown else f"a {type(value).__name__}"
    raise TypeError(f"{name} must be a {kind.__name__}, like {usual}, got {got}")
