"""Classes made at run time, for objects that exist already.

``fully_shard`` and the optimizer steps change what an object does by assigning a subclass of its
class to ``__class__``. Python allows this if both classes have the same instance layout. The layout
follows the chain of "best bases"; among bases that add equally much, Python takes the first. So a
mixin in front of the class changes the chain if the class itself has a base without fields before
``nn.Module`` (``ABC``, ``Generic``, a mixin with ``__slots__ = ()``). The remedy is an empty
subclass of the class in front of the mixin. It puts the class back at the head of the chain, and
the method resolution order stays the same.
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
        namespace: the attributes of the new class.
        before, after: further bases, before and after the object's class in the order of method
            resolution.

    Raises:
        TypeError: if the class does not permit such a subclass.
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
    """The original class of a class that `class_for` made."""
    return vars(made)[_ORIGINAL]


def _try(instance: object, made: type) -> None:
    cls = type(instance)
    object.__setattr__(instance, "__class__", made)
    object.__setattr__(instance, "__class__", cls)
