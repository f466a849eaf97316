"""Measures the computation of a step: operators, their cost, and the memory of their results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

from .events import Compute, Operation, Uncosted
from .known_results import KnownResults
from .op_costs import OpCost, cost_of, has_no_kernel, may_copy, nbytes_of, operator_name

# For larger inputs, the size is extrapolated from shorter sequences.
_MAX_INPUT_BYTES = 32 * 2**20
_known: dict[Any, int] = {}


def with_workspace(func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """``result`` of an operation, with a workspace of the right size where it lacks one."""
    if func.name() != "aten::mkldnn_rnn_layer" or not isinstance(args[0], FakeTensor):
        return result
    output, hy, cy, workspace = result
    if workspace.numel() or not args[-1]:  # not for training
        return result
    nbytes = _size_of(func, args)
    return output, hy, cy, workspace.new_empty(nbytes, dtype=torch.uint8)


def with_float32_gradients(func: Any, args: tuple, result: Any) -> Any:
    """``result`` of an operation on the CPU, with gradients of the dtype that oneDNN makes."""
    name = "aten::mkldnn_rnn_layer_backward"
    if func.name() != name or not isinstance(args[0], FakeTensor):
        return result
    return tuple(None if g is None else g.new_empty(g.shape, dtype=torch.float32) for g in result)


def _size_of(func: Any, args: tuple) -> int:
    sequence = args[0]
    key = tuple((tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else str(a) for a in args)
    if key not in _known:
        length = sequence.shape[0]
        if sequence.nbytes <= _MAX_INPUT_BYTES or length <= 16:
            _known[key] = _run(func, args, length)
        else:
            short, longer = _run(func, args, 8), _run(func, args, 16)
            _known[key] = short + (longer - short) * (length - 8) // 8
    return _known[key]


def _run(func: Any, args: tuple, length: int) -> int:
    shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else None for a in args]
    shapes[0] = (length, *args[0].shape[1:])
    with unset_fake_temporarily(), torch.enable_grad():  # there is no workspace without gradients
        real = [
            a if shape is None else torch.zeros(shape, dtype=a.dtype)
            for a, shape in zip(args, shapes, strict=True)
        ]
        return func(*real)[3].nbytes


_DEVICE_OF = torch.ops.prim.device.default


class Awaited(NamedTuple):
    """A collective in flight.

    Attributes:
        number: its number.
        at_use: whether compute waits when something reads the result, and not at ``wait_tensor``.
            For fake tensors, ``wait_tensor`` is called as soon as they are made; in a run, such
            tensors wait when they are used.
    """

    number: int
    at_use: bool


class StorageMeter(TorchDispatchMode):
    """Counts the storages allocated inside the context, and the cost of operations.

    Args:
        device_type: the device whose kernels fake tensors represent.
        on_collective: called with the kind of each functional collective, the bytes of its whole
            data and its group, after earlier operations were counted; returns an `Awaited`.
        on_wait: called with the number of a collective when compute waits for it.
        on_operator: called with every other operator and its result.

    Attributes:
        live: bytes of the storages that live now.
        nbytes: bytes that all operations so far read and wrote.
        uncosted: the operators without a cost, by name.

    Example:
        >>> with StorageMeter() as meter:
        ...     y = torch.ones(256) * 2
        >>> meter.take().net  # the ones are gone
        1024
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device_type: str = "cpu",
        on_collective: Callable[[str, int, str], Awaited] | None = None,
        on_wait: Callable[[int], None] | None = None,
        on_operator: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_collective = on_collective
        self._on_wait = on_wait
        self._on_operator = on_operator
        self._in_flight: dict[int, Awaited] = {}  # by the storage of the result
        self._device_type = device_type
        self.live = 0
        self.nbytes = 0
        self.uncosted: dict[str, Uncosted] = {}
        self._start = 0
        self._peak = 0
        self._operations: list[Operation] = []
        self._tracked: dict[int, tuple[Any, int, int]] = {}  # weak reference, bytes, number
        self._memory: list[tuple[int, int]] = []  # as `Compute.memory`
        self._num_storages = 0
        self._free: dict[Any, bool] = {}
        self._known = KnownResults()
        self._paused = False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _DEVICE_OF:  # two of three calls, all from within torch
            return args[0].device
        if DTensor in types:  # it calls operators on its local tensors, which come here
            return NotImplemented
        kwargs = kwargs or {}
        if may_copy(func):
            with self:
                return func.decompose(*args, **kwargs)
        if self._paused:
            return func(*args, **kwargs)
        if self._in_flight:
            self._wait_for(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            result = func(*args, **kwargs)
            self._collective(func, args, result)
            return result
        result, cost = self._result_and_cost(func, args, kwargs)
        if self._on_operator is not None:
            self._on_operator(func, result)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor)
        if cost is not None:
            self.count(cost.operation, None if cost.known else operator_name(func))
        return result

    def _result_and_cost(self, func: Any, args: tuple, kwargs: dict) -> tuple[Any, OpCost | None]:
        """An operator's result on the device, and its cost; None: there is no kernel."""
        call = self._known.call_of(func, args, kwargs)
        known = None if call is None else self._known.find(call)
        if call is not None and known is not None:
            return known.make(call.tensors), known.cost
        result = with_workspace(func, args, kwargs, func(*args, **kwargs))
        if self._device_type == "cpu":
            result = with_float32_gradients(func, args, result)
        cost = None if self._is_free(func) else cost_of(func, args, kwargs, result)
        if call is not None:
            self._known.keep(call, result, cost)
        return result, cost

    def _collective(self, func: Any, args: tuple, result: Any) -> None:
        name = operator_name(func).partition("::")[2].rstrip("_")
        if name == "wait_tensor":
            old = args[0].untyped_storage()
            awaited = self._in_flight.get(old._cdata)
            if awaited is not None and not awaited.at_use:
                self._wait(old)
            self._continue(old, result.untyped_storage())
            return
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        kind = next((each for each in kinds if name.startswith(each)), None)
        if kind is None:
            raise ValueError(f"The model calls the collective {name}, whose cost is unknown")
        assert self._on_collective is not None, "no collectives without DTensors"
        whole = result if kind == "all_gather" else args[0]
        if kind == "all_to_all" and _goes_to_one_rank(args[2]):
            kind = "send"
        awaited = self._on_collective(kind, nbytes_of(whole), args[-1])
        if isinstance(result, torch.Tensor):
            self.track(result)
            self._in_flight[result.untyped_storage()._cdata] = awaited

    def _wait_for(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Wait for the collectives whose results ``func`` reads."""
        if self._is_free(func) or operator_name(func).endswith("::wait_tensor"):
            return
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._wait(tensor.untyped_storage())

    def _wait(self, storage: torch.UntypedStorage) -> None:
        """Wait for the collective whose result is in ``storage``, if it is in flight."""
        awaited = self._in_flight.pop(storage._cdata, None)
        if awaited is not None:
            assert self._on_wait is not None
            self._on_wait(awaited.number)

    def _continue(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Count ``new`` instead of ``old``: in a run, both would be the same storage."""
        if old._cdata == new._cdata or old._cdata not in self._tracked:
            return
        reference, nbytes, number = self._tracked[old._cdata]
        self._tracked[old._cdata] = (reference, 0, number)
        again = weakref.ref(new, self._when_dead(new._cdata))
        self._tracked[new._cdata] = (again, nbytes, number)
        if old._cdata in self._in_flight:
            self._in_flight[new._cdata] = self._in_flight.pop(old._cdata)

    def count(self, operation: Operation, without_cost: str | None = None) -> None:
        """Add an operation; ``without_cost`` is the name of an operator of unknown cost."""
        if self._paused:
            return
        self._operations.append(operation)
        self.nbytes += operation.nbytes
        if without_cost is not None:
            before = self.uncosted.get(without_cost, Uncosted(0, 0))
            self.uncosted[without_cost] = Uncosted(
                before.calls + 1, before.nbytes + operation.nbytes
            )

    def count_tensors(
        self,
        read: Iterable[torch.Tensor | None],
        written: Iterable[torch.Tensor | None],
        *,
        flops: int = 0,
        attention: bool = False,
    ) -> None:
        """Add a kernel that is not an operator."""
        used = [t for t in (*read, *written) if t is not None]
        nbytes = sum(map(nbytes_of, used))
        self.count(Operation(flops, nbytes, used[0].dtype, attention))

    def _is_free(self, func: Any) -> bool:
        """Whether there is no kernel: views, and allocations."""
        known = self._free.get(func)
        if known is None:
            known = self._free[func] = has_no_kernel(func)
        return known

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose operations are not counted."""
        outer, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = outer

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` from now on, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tracked:
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        number = self._num_storages
        self._num_storages += 1
        self._tracked[key] = (weakref.ref(storage, self._when_dead(key)), nbytes, number)
        self._memory.append((number, nbytes))
        self.live += nbytes
        self._peak = max(self._peak, self.live)

    def _when_dead(self, key: int) -> Callable[[Any], None]:
        def dead(_: Any) -> None:
            _, nbytes, number = self._tracked.pop(key)
            self._in_flight.pop(key, None)  # nothing has read it
            self.live -= nbytes
            if nbytes:
                self._memory.append((number, 0))

        return dead

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage in `Compute.memory`; -1 if it is not there."""
        return self._tracked.get(storage._cdata, (None, 0, -1))[2]

    def ignore(self, tensor: torch.Tensor) -> int:
        """Stop counting the storage of ``tensor``; returns the bytes that it counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference, nbytes, number = self._tracked.get(key, (None, 0, -1))
        if reference is None:
            reference = weakref.ref(storage, self._when_dead(key))
        # The reference stays, so that views of this storage do not count as new storages.
        self._tracked[key] = (reference, 0, number)
        self.live -= nbytes
        return nbytes

    @property
    def num_operations(self) -> int:
        """Number of operations since the last `take`."""
        return len(self._operations)

    def take(self) -> Compute | None:
        """The computation since the last call; None if there was none."""
        if not self._operations and not self._memory:
            return None
        done = Compute(
            tuple(self._operations),
            max(0, self._peak - self._start),
            self.live - self._start,
            tuple(self._memory),
        )
        self.begin()
        return done

    def begin(self) -> None:
        """Start counting from here."""
        self._start = self._peak = self.live
        self._operations.clear()
        self._memory.clear()


def _goes_to_one_rank(sizes: Any) -> bool:
    """Whether an all-to-all with these send sizes is a single message."""
    return sum(1 for size in sizes if size) == 1
