"""Classes made at run time, for objects that exist already.

``fully_shard`` and the optimizer steps change what an object does by assigning a subclass of its
class to ``__class__``. Python allows that where both classes lay out their instances alike, which
is decided by the chain of "best bases": of bases that add equally much, the first. So a mixin in
front of the class changes the chain as soon as the class itself has a base without fields before
``nn.Module`` (``ABC``, ``Generic``, a mixin with ``__slots__ = ()``). An empty subclass of the
class in front of the mixin puts the class back at the head of the chain, and leaves the order of
method resolution as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ORIGINAL = "_class_before_fsdp2"


def class_for(
    instance: object,
    name: str,
    namespace: dict[str, Any],
    *,
    before: tuple[type, ...] = (),
    after: tuple[type, ...] = (),
) -> type:
    """A subclass of an object's class that can be assigned to its ``__class__``.

    Args:
        instance: the object; it is not changed.
        name: of the new class, which is in the same module as the object's.
        namespace: what the new class has itself.
        before, after: further bases, before and after the object's class in the order of method
            resolution.

    Raises:
        TypeError: the class cannot have subclasses, or not such ones.
    """
    cls = type(instance)
    namespace = {"__module__": cls.__module__, _ORIGINAL: cls, **namespace}

    def plain() -> type:
        return type(name, (*before, cls, *after), dict(namespace))

    def with_layout() -> type:
        layout = type(f"{cls.__name__}Layout", (cls,), {"__module__": cls.__module__})
        return type(name, (layout, *before, cls, *after), dict(namespace))

    reasons: list[str] = []
    makers: list[Callable[[], type]] = [plain, with_layout] if before else [plain]
    for make in makers:
        try:
            made = make()
            _try(instance, made)
        except Exception as error:  # a class may refuse subclasses with any error
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            return made
    raise TypeError(
        f"{cls.__name__} cannot be extended: it needs a subclass that its instances can change to, "
        f"and making one failed with {reasons[0]}. If the class or its metaclass refuses "
        "subclasses, or demands arguments for them (__init_subclass__), let it accept a subclass "
        "without any"
    )


def original_class(made: type) -> type:
    """The class that one made by `class_for` extends."""
    return vars(made)[_ORIGINAL]


def _try(instance: object, made: type) -> None:
    cls = type(instance)
    object.__setattr__(instance, "__class__", made)
    object.__setattr__(instance, "__class__", cls)
