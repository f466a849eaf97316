"""`offload_optimizer` in numbers: which state is elsewhere, and what a step brings back when.

The parts of a step and their order are those of `offload.optimizer_state`: while a part is stepped,
the state of the next one is on its way, and that of the last one on its way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...common.checks import check_bytes
from ...offload.homes import PAGE_BYTES, whole_pages
from ...offload.paging import ALIGN_BYTES, chunks_of
from .account import Account, Held
from .optimizers import NO_OPTIMIZER, OptimizerCost, ParamCost, sum_of

IN_HOST_MEMORY, IN_FILES = "cpu", "files"


@dataclass(frozen=True)
class StateOffload:
    """An `offload_optimizer`, for `estimate`, `predict` and `plan`: its arguments.

    Attributes:
        to: "cpu", host memory; or "files", in any folder.
        max_device_bytes, chunk_bytes, min_bytes: as in `offload_optimizer`.

    Raises:
        ValueError: if ``to`` is something else, or a number is negative.
        TypeError: for a number that is no int.

    Example:
        >>> from fsdp2 import StateOffload
        >>> StateOffload(max_device_bytes=2 << 30).to
        'cpu'
    """

    to: str = IN_HOST_MEMORY
    max_device_bytes: int = 0
    chunk_bytes: int = 256 << 20
    min_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        if self.to not in (IN_HOST_MEMORY, IN_FILES):
            raise ValueError(
                f"StateOffload: to must be '{IN_HOST_MEMORY}' or '{IN_FILES}' (in any folder), got "
                f"{self.to!r}"
            )
        for name in ("max_device_bytes", "chunk_bytes", "min_bytes"):
            check_bytes(name, getattr(self, name))


class Part(NamedTuple):
    """What is stepped together.

    Attributes:
        away: bytes of its state that are elsewhere between steps.
        image: of these, what is in memory of the device while it is stepped.
        buffer: host memory that they take on their way from and to files.
        traffic: bytes that its step reads and writes.
        moment: scratch bytes of its step.
    """

    away: int
    image: int
    buffer: int
    traffic: int
    moment: int


@dataclass(frozen=True)
class PagedState:
    """The state of an optimizer that is partly elsewhere, on one rank.

    Attributes:
        kept: bytes of each tensor that stays on the device.
        host_kept: of each that stays in host memory, as its parameter is there.
        parts: of a step, in order.
        in_files: whether what is away is in files.
    """

    kept: tuple[int, ...]
    host_kept: tuple[int, ...]
    parts: tuple[Part, ...]
    in_files: bool = False

    @property
    def away(self) -> int:
        """Bytes that are elsewhere between steps."""
        return sum(part.away for part in self.parts)

    @property
    def back_peak(self) -> int:
        """The most bytes that are with the parameters at once, beside those that stay."""
        sizes = [part.away for part in self.parts]
        return max((sum(sizes[max(i - 1, 0) : i + 2]) for i in range(len(sizes))), default=0)

    @property
    def buffer_peak(self) -> int:
        """The most host memory of buffers: reads are one part further ahead."""
        sizes = [part.buffer for part in self.parts]
        return max((sum(sizes[max(i - 1, 0) : i + 3]) for i in range(len(sizes))), default=0)


@dataclass(frozen=True)
class PlacedOptimizer:
    """The optimizer of one rank, and where its state is.

    Attributes:
        device: its cost for the parameters on the device; on the CPU, for all.
        host: for those in host memory beside a device.
        paged: what `offload_optimizer` does about both; None: there is none.
    """

    device: OptimizerCost
    host: OptimizerCost = NO_OPTIMIZER
    paged: PagedState | None = None

    @property
    def device_tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor of the state that stays on the device between steps."""
        return self.device.tensors if self.paged is None else self.paged.kept

    @property
    def device_state(self) -> int:
        return sum(self.device_tensors) if self.paged is not None else self.device.state

    @property
    def host_state(self) -> int:
        """Bytes of the state in host memory between steps."""
        if self.paged is None:
            return self.host.state
        return sum(self.paged.host_kept) + (0 if self.paged.in_files else self.paged.away)

    @property
    def file_bytes(self) -> int:
        return self.paged.away if self.paged is not None and self.paged.in_files else 0

    @property
    def buffer_bytes(self) -> int:
        """Host memory beside a device that files need in a step."""
        return 0 if self.paged is None else self.paged.buffer_peak

    def count_away(self, account: Account, *, offloaded: bool) -> None:
        """Count what is in host memory and in files, and the buffers that files need."""
        if offloaded or self.host_state:
            account.host["optimizer state"] = self.host_state
        for name, nbytes in (
            ("optimizer state in files", self.file_bytes),
            ("buffers of files", self.buffer_bytes),
        ):
            if nbytes:
                account.host[name] = nbytes

    def make_state(self, account: Account) -> None:
        """Allocate what the first step leaves."""
        for nbytes in self.device_tensors:
            account.allocate(nbytes)

    def step(self, account: Account, *, ordered: bool) -> None:
        """The memory of a step; ``ordered``: the device is the CPU."""
        if self.paged is None:
            account.touch("optimizer scratch", self.device.moment, allocates=False)
            for block in [account.allocate(nbytes) for nbytes in self.device.moments]:
                account.free(block)
        else:
            # On the CPU the buffers that files are read into are what is stepped.
            _step_parts(account, self.paged, 2 if ordered else 1)


def _step_parts(account: Account, paged: PagedState, ahead: int) -> None:
    """The images and the scratch memory of a step in parts, as `offload_optimizer` does it.

    Args:
        ahead: how many parts further the images are there.
    """
    images: dict[int, Held] = {}
    for number, part in enumerate(paged.parts):
        for each in range(number, number + ahead + 1):
            if each < len(paged.parts) and each not in images:
                images[each] = Held(account, "optimizer state", paged.parts[each].image)
        account.touch("optimizer scratch", part.moment)
        images.pop(number - 1, None)


def sum_of_placed(optimizers: Sequence[PlacedOptimizer]) -> PlacedOptimizer:
    """One optimizer for the parameters of several models, none of it paged."""
    assert all(each.paged is None for each in optimizers)
    return PlacedOptimizer(
        sum_of([each.device for each in optimizers]), sum_of([each.host for each in optimizers])
    )


NOTHING = PlacedOptimizer(NO_OPTIMIZER)


class _Page(NamedTuple):
    cost: ParamCost
    nbytes: int  # as `Page.nbytes`
    away: int


def paged_state(params: Sequence[ParamCost], offload: StateOffload, *, is_cpu: bool) -> PagedState:
    """Where the state of an optimizer is.

    Args:
        params: of this rank, in the order of the optimizer.
        is_cpu: whether the device is the CPU: its memory is host memory.
    """
    in_files = offload.to == IN_FILES
    pages: list[_Page] = []
    kept: dict[bool, list[int]] = {False: [], True: []}
    stays = 0  # as `Counts.kept`
    for param in params:
        large = [n for n in param.state if n >= offload.min_bytes]
        here = kept[param.on_host]
        here += [*(n for n in param.state if n < offload.min_bytes), *param.numbers]
        end = sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in large)
        if (
            not end
            or ((param.on_host or is_cpu) and not in_files)
            or stays + end <= offload.max_device_bytes
        ):
            stays += end
            here += large
            pages.append(_Page(param, end or 2 * param.nbytes, 0))
        else:
            pages.append(_Page(param, end, end))
    parts = [_part(chunk, in_files, is_cpu) for chunk in chunks_of(pages, offload.chunk_bytes)]
    return PagedState(tuple(kept[False]), tuple(kept[True]), tuple(parts), in_files)


def _part(pages: Sequence[_Page], in_files: bool, is_cpu: bool) -> Part:
    buffers = sum(whole_pages(p.away) + PAGE_BYTES for p in pages if p.away) if in_files else 0
    moments = [page.cost.moment for page in pages]
    return Part(
        sum(page.away for page in pages),
        buffers if is_cpu else sum(p.away for p in pages if not p.cost.on_host),
        0 if is_cpu else buffers,
        sum(page.cost.traffic for page in pages),
        max(moments, default=0) if is_cpu else sum(moments),
    )
