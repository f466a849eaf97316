"""Policies that choose the units of a model: by class, size, name, function and structure.

One call of `fully_shard` makes a *unit*: the parameters of a module, or of a group of modules, that
are gathered and reduced together. A policy takes a model and returns names of modules. `units_of`
returns the resulting units with their parameters, as bottom-up calls of `fully_shard` would make
them. Nothing here changes a model or communicates, and the model may be on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .common.suggestions import did_you_mean
from .render.text import bytes_of

Group = tuple[str, ...]  # names of the modules of one unit
WrapPolicy = Callable[[nn.Module], Iterable[str | Sequence[str]]]

# `auto` makes no unit smaller than this, or than this fraction of the model: every unit costs
# messages and host time, however small it is.
AUTO_MIN_BYTES = 1024 * 1024
AUTO_MIN_FRACTION = 1 / 128

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class UnitDescription:
    """One unit of a model that is not sharded yet.

    Attributes:
        modules: qualified names of its modules; ``("",)`` is the model itself.
        params: qualified names of its parameters in the order of the model; the first name of a
            tied parameter.
        is_root: whether it is the unit of the model itself, which takes the remaining parameters.
    """

    modules: Group
    params: tuple[str, ...]
    is_root: bool

    @property
    def name(self) -> str:
        """The unit's name in messages and tables."""
        return ", ".join(name or "(root)" for name in self.modules)


def units_of(
    model: nn.Module, wrap: Any = "auto", *, ignored_params: Collection[nn.Parameter] = ()
) -> list[UnitDescription]:
    """Return the units into which ``wrap`` divides ``model``; the model is not changed.

    Args:
        model: a model that is not sharded yet; may be on the meta device.
        wrap: ``"auto"`` (see `auto`); ``"root"`` or None for one unit; a module class, or
            ``"class:Block,Embedding"``; ``"size:32MiB"`` (see `by_size`); a pattern of names; a
            function that takes the model and returns names; or a list of these. In a list, a tuple
            of names is one unit of several modules.
        ignored_params: parameters that belong to no unit.

    Returns:
        The units in the order in which to call `fully_shard`: each before the units that enclose
        it, the root last. A parameter that is tied across units belongs to the innermost unit that
        contains all modules that hold it. Units without parameters are left out, except the root.

    Raises:
        ValueError: if a name matches no module; if a module would be in two units, or cannot be a
            unit; or if the model is already sharded.
        TypeError: for any other kind of ``wrap``.

    Example:
        >>> for unit in units_of(model, [Block, "embedding", ("norm", "head")]):
        ...     print(unit.name, len(unit.params))
    """
    for name, module in model.named_modules():
        if "_fsdp2_unit" in vars(module):
            raise ValueError(
                f"Module '{name or '(root)'}' is sharded already: units_of needs a model before "
                "sharding; explain() shows the units afterwards"
            )
    modules = dict(model.named_modules())
    groups = _in_call_order(model, _checked_groups(modules, as_policy(wrap)(model)))
    _check_shared(modules, groups)
    inside = [_modules_of(modules, group) for group in groups]
    params: list[list[str]] = [[] for _ in groups]
    ignored = {id(param) for param in ignored_params}
    for name, param, owners in parameters_of(model):
        if id(param) not in ignored:
            unit = next(i for i, members in enumerate(inside) if owners <= members)
            params[unit].append(name)
    return [
        UnitDescription(group, tuple(names), is_root=group == ("",))
        for group, names in zip(groups, params, strict=True)
        if names or group == ("",)
    ]


# -- policies ------------------------------------------------------------------------------------


def as_policy(wrap: Any) -> WrapPolicy:
    """Convert a ``wrap`` argument to a policy; see `units_of`.

    Returns:
        A function that takes the model and returns tuples of module names, one tuple per unit.

    Raises:
        TypeError: for any other kind of ``wrap``.

    Example:
        >>> sorted(as_policy(Block)(model))
        [('layers.0',), ('layers.1',)]
    """
    if wrap is None or wrap in ("root", "none"):
        return lambda model: ()
    if isinstance(wrap, str):
        return _of_text(wrap)
    if isinstance(wrap, type):
        return by_class(wrap)
    if callable(wrap):
        return wrap
    if isinstance(wrap, list | tuple):
        return _union([_element(item) for item in wrap])
    raise TypeError(
        f"wrap must be 'auto', 'root', a module class or 'class:NAME', 'size:BYTES', names, a "
        f"function of the model or a list of such, got {wrap!r}"
    )


def _of_text(text: str) -> WrapPolicy:
    """The policy for a string, as on the command line; several names in one string do not work."""
    kind, _, rest = text.partition(":")
    if kind == "class" and rest:
        return by_class(*(name.strip() for name in rest.split(",")))
    if kind == "size" and rest:
        return by_size(min_bytes=bytes_of(rest))
    return auto() if text == "auto" else by_name(text)


def _element(item: Any) -> WrapPolicy:
    if isinstance(item, list | tuple) and item and all(isinstance(part, str) for part in item):
        return by_name(tuple(item))
    return as_policy(item)


def _union(policies: Sequence[WrapPolicy]) -> WrapPolicy:
    """A policy with the units of all ``policies``, without duplicates."""

    def policy(model: nn.Module) -> list[Group]:
        return list(dict.fromkeys(_group(g) for each in policies for g in each(model)))

    return policy


def by_class(*classes: type[nn.Module] | str) -> WrapPolicy:
    """Make every instance of these classes a unit.

    Args:
        classes: classes, or their names.

    Raises:
        TypeError: for anything else.
        ValueError: from the policy, if the model has no such module.

    Example:
        >>> shard_model(model, wrap=by_class(TransformerBlock, nn.Embedding))
    """
    for cls in classes:
        if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"by_class expects subclasses of nn.Module or their names, got {cls!r}")

    def is_a(module: nn.Module, cls: type[nn.Module] | str) -> bool:
        if isinstance(cls, str):
            return any(base.__name__ == cls for base in type(module).__mro__)
        return isinstance(module, cls)

    def policy(model: nn.Module) -> list[Group]:
        inner = list(_inner_modules(model))
        for cls in classes:
            if not any(is_a(module, cls) for _, module in inner):
                name = cls if isinstance(cls, str) else cls.__name__
                hint = did_you_mean(name, {type(module).__name__ for _, module in inner})
                raise ValueError(f"The model has no module of class {name}{hint or _known(model)}")
        return [(name,) for name, module in inner if any(is_a(module, cls) for cls in classes)]

    return policy


def by_name(*patterns: str | tuple[str, ...]) -> WrapPolicy:
    """Make the modules with these names units.

    Args:
        patterns: qualified names. The parts between dots may have the wildcards ``*``, ``?`` and
            ``[...]``: ``"layers.*"`` matches every layer, but no module inside a layer. A tuple of
            patterns is one unit.

    Raises:
        ValueError: from the policy, if a pattern matches nothing.

    Example:
        >>> shard_model(model, wrap=by_name("embedding", "layers.*", ("norm", "head")))
    """

    def policy(model: nn.Module) -> list[Group]:
        modules = dict(_inner_modules(model))
        groups: list[Group] = []
        for pattern in patterns:
            if isinstance(pattern, str):
                groups += [(name,) for name in _matching(pattern, modules)]
            else:
                groups.append(tuple(name for each in pattern for name in _matching(each, modules)))
        return groups

    return policy


def by_function(chosen: Callable[[str, nn.Module], bool]) -> WrapPolicy:
    """Make every module for which ``chosen(name, module)`` is true a unit.

    Example:
        >>> shard_model(model, wrap=by_function(lambda name, m: name.endswith(".mlp")))
    """

    def policy(model: nn.Module) -> list[Group]:
        return [(name,) for name, module in _inner_modules(model) if chosen(name, module)]

    return policy


def by_size(min_numel: int | None = None, *, min_bytes: int | None = None) -> WrapPolicy:
    """Make the smallest units that have at least this many elements or bytes.

    The policy is greedy and works bottom-up. A module becomes a unit if it is large enough without
    the parameters of its inner units; otherwise its parameters go to the enclosing unit.
    ``nn.MultiheadAttention`` is not split, as it uses weights of its inner modules without calling
    them. ``size_based_auto_wrap_policy`` of torch's first FSDP has the same rule.

    Args:
        min_numel: minimum number of elements.
        min_bytes: minimum bytes of the parameters, in their stored dtype.

    Raises:
        ValueError: unless exactly one of the two is given, and positive.

    Example:
        >>> shard_model(model, wrap=by_size(min_bytes=32 * 2**20))
    """
    least = min_numel if min_bytes is None else min_bytes
    if (min_numel is None) == (min_bytes is None) or least is None or least <= 0:
        raise ValueError(
            "by_size needs one of min_numel and min_bytes, a positive number; got "
            f"min_numel={min_numel}, min_bytes={min_bytes}"
        )

    def policy(model: nn.Module) -> list[Group]:
        seen: set[int] = set()
        groups: list[Group] = []

        def leave(name: str, module: nn.Module) -> int:
            """Wrap within ``module``, maybe itself; return what is left for the enclosing unit."""
            left = 0
            for param in module._parameters.values():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    left += param.numel() if min_bytes is None else param.nbytes
            start = len(groups)
            for child_name, child in module.named_children():
                left += leave(f"{name}.{child_name}" if name else child_name, child)
            if isinstance(module, nn.MultiheadAttention):
                left += sum(sizes.pop(group) for group in groups[start:])
                del groups[start:]
            if left >= least and not isinstance(module, _CONTAINERS):
                groups.append((name,))
                sizes[name,] = left
                return 0
            return left

        sizes: dict[Group, int] = {}
        leave("", model)
        return [group for group in groups if group != ("",)]

    return policy


def auto(min_bytes: int | None = None) -> WrapPolicy:
    """Choose units by repeated structure and size, as one would by hand for common models.

    The units are:

    - the *blocks*: elements of the same class in a ModuleList, ModuleDict or Sequential. If their
      structure differs and they consist of blocks (stages of a network), the inner blocks are used
      instead, but not the experts inside a layer. Layers without inner modules count too if they
      are large enough;
    - every embedding outside the blocks;
    - the modules after the last block (norm and head) as one unit, as in torchtitan;
    - other parts outside the blocks that are larger than the largest block.

    The root takes the rest: parts smaller than ``min_bytes``, and tied parameters. It frees an
    embedding or head early if backward does not need it, and reduces its gradient early.

    Args:
        min_bytes: minimum size of a unit's parameters. None: 1 MiB, or 1/128 of a small model.

    Example:
        >>> shard_model(model, wrap="auto")
    """

    def policy(model: nn.Module) -> list[Group]:
        owned = _OwnBytes(model)
        least = min_bytes
        if least is None:
            least = int(min(AUTO_MIN_BYTES, owned([""]) * AUTO_MIN_FRACTION))
        least = max(least, 1)
        blocks = [name for name in _blocks(model) if owned([name]) >= least]
        groups: list[Group] = [(name,) for name in blocks]
        largest = max((owned([name]) for name in blocks), default=None)
        before, after = _outside(model, set(blocks))
        for name, module in before:
            if largest is not None and owned([name]) > max(largest, least):
                groups.append((name,))
                continue
            for inner, each in module.named_modules(prefix=name):
                if isinstance(each, _EMBEDDINGS) and owned([inner]) >= least:
                    groups.append((inner,))
        if owned([name for name, _ in after]) >= least:
            groups.append(tuple(name for name, _ in after))
        return groups

    return policy


# -- structure -----------------------------------------------------------------------------------


def _blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of ``model``, outermost first."""
    found: dict[int, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        children = [
            (f"{name}.{key}" if name else key, child) for key, child in module.named_children()
        ]
        alike = Counter(type(child) for _, child in children if _num_params(child))
        for child_name, child in children:
            is_stack = isinstance(module, (*_CONTAINERS, nn.Sequential))
            if is_stack and alike[type(child)] > 1 and _is_block(child, module):
                found.setdefault(id(child), child_name)
            else:
                visit(child_name, child)

    visit("", model)
    return list(found.values())


def _is_block(child: nn.Module, stack: nn.Module) -> bool:
    """Whether an element of ``stack`` is a block, rather than a stage made of blocks."""
    if isinstance(child, _CONTAINERS):
        return False
    siblings = [other for other in stack.children() if type(other) is type(child)]
    structures = Counter(map(_structure, siblings))
    return max(structures.values()) > 1 or not any(_blocks(other) for other in siblings)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same classes and shapes."""
    own = tuple((k, None if p is None else p.shape) for k, p in module._parameters.items())
    inner = tuple((name, _structure(child)) for name, child in module.named_children())
    return type(module), own, inner


def _outside(
    model: nn.Module, blocks: set[str]
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """The largest modules with parameters that neither contain blocks nor lie in one: those
    before the last block, and those after it."""
    pieces: list[tuple[str, nn.Module]] = []
    last = 0

    def visit(name: str, module: nn.Module) -> None:
        nonlocal last
        if name in blocks:
            last = len(pieces)
            return
        prefix = f"{name}." if name else ""
        whole = name and not any(block.startswith(prefix) for block in blocks)
        if whole and not isinstance(module, _CONTAINERS):
            if _num_params(module):
                pieces.append((name, module))
            return
        for key, child in module.named_children():
            visit(prefix + key, child)

    visit("", model)
    return (pieces[:last], pieces[last:]) if blocks else (pieces, [])


def _num_params(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


class _OwnBytes:
    """Bytes of the parameters that only modules of a group hold."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._params = [(param.nbytes, owners) for _, param, owners in parameters_of(model)]

    def __call__(self, group: Sequence[str]) -> int:
        members = _modules_of(self._modules, group)
        return sum(nbytes for nbytes, owners in self._params if owners <= members)


# -- units ---------------------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, set[nn.Module]]]:
    """Yield each parameter once: its first name, the parameter, and all modules that hold it."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), set()).add(module)
    for name, param in model.named_parameters():
        yield name, param, owners[id(param)]


def _inner_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name)


def _modules_of(modules: dict[str, nn.Module], group: Iterable[str]) -> set[nn.Module]:
    return {inner for name in group for inner in modules[name].modules()}


def _known(model: nn.Module) -> str:
    """The classes of repeated blocks, for the end of a message."""
    modules = dict(model.named_modules())
    classes = dict.fromkeys(type(modules[name]).__name__ for name in _blocks(model))
    return f"; its blocks are of class {', '.join(list(classes)[:5])}" if classes else ""


def _matching(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    names = list(modules)
    parts = pattern.split(".")
    found = []
    for name in names:
        own = name.split(".")
        if len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            found.append(name)
    if not found:
        some = ", ".join(f"'{name}'" for name in names[:5])
        hint = did_you_mean(pattern, [*names, "auto", "root", *_with_wildcards(names)])
        if any(pattern == cls.__name__ for m in modules.values() for cls in type(m).__mro__):
            hint = f': for a class, wrap={pattern} or wrap="class:{pattern}"'
        raise ValueError(f"No module is named '{pattern}'; the model has {some}, ...{hint}")
    return found


def _with_wildcards(names: Iterable[str]) -> set[str]:
    """Patterns for elements of lists: ``layers.*`` for ``layers.0``."""
    return {".".join("*" if part.isdecimal() else part for part in n.split(".")) for n in names}


def _group(names: str | Sequence[str]) -> Group:
    return (names,) if isinstance(names, str) else tuple(names)


def _checked_groups(
    modules: dict[str, nn.Module], groups: Iterable[str | Sequence[str]]
) -> list[Group]:
    """The groups without duplicates, the model itself last."""
    taken: dict[str, Group] = {}
    checked: dict[Group, None] = {}
    for names in groups:
        group = _group(names)
        if group in checked or group == ("",):
            continue
        for name in group:
            if name not in modules or not name:
                raise ValueError(f"A wrap policy named the module '{name}', which does not exist")
            module = modules[name]
            if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"'{name}' is a {type(module).__name__}, which has no forward and so cannot be "
                    f"a unit: name its elements ('{name}.*')"
                )
            if name in taken:
                raise ValueError(f"Module '{name}' is in two units: {taken[name]} and {group}")
            taken[name] = group
        checked[group] = None
    return [*checked, ("",)]


def _check_shared(modules: dict[str, nn.Module], groups: list[Group]) -> None:
    """Reject modules in two units: it would be undefined which one gathers their parameters."""
    tops = {modules[name] for group in groups for name in group}
    names = {module: name for name, module in modules.items()}
    taken: dict[nn.Module, Group] = {}

    def visit(module: nn.Module, group: Group) -> None:
        other = taken.setdefault(module, group)
        if other != group and any(p is not None for p in module._parameters.values()):
            both = " and ".join(", ".join(n or "(root)" for n in each) for each in (other, group))
            raise ValueError(
                f"Module '{names[module]}' is part of two units, {both}: make it a unit by "
                "adding its name to the list for wrap"
            )
        for child in module.children():
            if child not in tops:
                visit(child, group)

    for group in groups:
        for name in group:
            visit(modules[name], group)


def _in_call_order(model: nn.Module, groups: list[Group]) -> list[Group]:
    """Each unit before the units that enclose it, ordered by the last of its modules to finish."""
    ends: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules()}

    def visit(module: nn.Module) -> None:
        if names[module] in ends:
            return
        for child in module.children():
            visit(child)
        ends[names[module]] = len(ends)

    visit(model)
    return sorted(groups, key=lambda group: max(ends[name] for name in group))
