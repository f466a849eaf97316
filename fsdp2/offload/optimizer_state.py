"""`offload_optimizer`: the state of an optimizer in host memory or files, brought back in parts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm.streams import copy_stream_for
from ..common.checks import check_bytes
from ..common.copies import CopyStream
from ..dtensor.parts import local_part
from ..optim.local import elementwise_trial, step_with
from ..optim.stepping import (
    KEPT,
    original_name,
    remembered_attributes,
)
from .paging import Page, PagingOptions, StateBytes, chunks_of

T = TypeVar("T", bound=Optimizer)


def offload_optimizer(
    optimizer: T,
    to: str | os.PathLike[str] = "cpu",
    *,
    max_device_bytes: int = 0,
    chunk_bytes: int = 256 << 20,
    min_bytes: int = 64 * 1024,
    pin_memory: bool = True,
    elementwise: bool = False,
) -> T:
    """Keep the state of an optimizer in host memory, or in files, between its steps.

    ``optimizer.step()`` handles the parameters in parts of ``chunk_bytes`` of state. While it steps
    one part, a separate stream and threads bring the state of the next part to its parameters, and
    take the state of the previous part back. The optimizer must treat every element independently
    of the others; this is tested as by `fsdp2.optim.local_step`. It sees local tensors, as there,
    and results are the same.

    - *Parameters on a device:* the step runs on the device. Each step copies the state once each
      way (with AdamW in float32: 16 bytes per parameter).
    - *Parameters in host memory* (`CPUOffloadPolicy`): the step runs there (choose ``fused=True``).
      Only files make a difference then.

    Between steps, ``optimizer.state`` has tensors (DTensors for DTensor parameters) over host
    memory or over the mapped files. So ``state_dict``, checkpoints and loading work as usual.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: it becomes an
            instance of a subclass of its class.
        to: "cpu", or a folder on a local disk (NVMe). Files are read and written by direct I/O.
            Each rank has unnamed files, which vanish with the optimizer or the process.
        max_device_bytes: bytes of state that stay with their parameters: the state of the first
            parameters that fit.
        chunk_bytes: bytes of state that are stepped together. At most three times as many are
            with the parameters at once, in addition to those that stay. A parameter with more state
            is a separate part.
        min_bytes: smaller tensors of the state stay with their parameters.
        pin_memory: whether to page-lock host memory for parameters on a device.
        elementwise: True asserts that the optimizer is elementwise and skips the test.

    Returns:
        The same optimizer.

    Raises:
        TypeError: if the optimizer is not elementwise, keeps state in its groups or attributes
            (raised in its first step), wraps another optimizer, or requires a closure.
        ValueError: if it is differentiable, its ``step`` was replaced (as by
            `fsdp2.optim.flat_step`, which cannot be combined with this), or a number is negative.
        OSError: if the folder cannot be created; in a step, if the disk is full or fails.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> optimizer = offload_optimizer(optimizer, "state-of-this-run", max_device_bytes=1 << 30)
        >>> optimizer.step()
    """
    # CPU optimizers for parameters on a device (ZeRO-Offload, arXiv 2101.06840) are what
    # `CPUOffloadPolicy` gives; states in files are ZeRO-Infinity's (arXiv 2104.07857).
    for name, value in (
        ("max_device_bytes", max_device_bytes),
        ("chunk_bytes", chunk_bytes),
        ("min_bytes", min_bytes),
    ):
        check_bytes(name, value)
    folder = None
    if os.fspath(to) != "cpu":
        folder = Path(to)
        folder.mkdir(parents=True, exist_ok=True)
    trials = [] if elementwise else [elementwise_trial()]
    options = PagingOptions(folder, max_device_bytes, chunk_bytes, min_bytes, pin_memory)
    why = "The state of a differentiable optimizer belongs to a graph: it has to stay"
    return step_with(
        optimizer, "offload_optimizer", "Offloaded", _run, trials, why, offload=options
    )


def _run(
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kept = vars(optimizer)[KEPT]
    for trial in kept["trials"]:
        trial.check(optimizer, raw, False)
    pager = vars(optimizer).get("_fsdp2_pager")
    if pager is None:
        pager = vars(optimizer)["_fsdp2_pager"] = Pager(kept["offload"])
    loss = None
    if closure is not None:  # once, and not once for each part
        with torch.enable_grad():
            loss = closure()
    result = pager.step(optimizer, raw, args, kwargs)
    return result if closure is None else loss


class Pager:
    """The pages of an optimizer, from step to step."""

    def __init__(self, options: PagingOptions) -> None:
        self._options = options
        self.counts = StateBytes()
        self._pages: dict[int, Page] = {}  # by the parameter's id
        self._copies: dict[torch.device, CopyStream | None] = {}
        # Reads of the next part must not wait behind writes of the last one.
        self._readers = ThreadPoolExecutor(1, "fsdp2-state-reads")
        self._writers = ThreadPoolExecutor(1, "fsdp2-state-writes")

    def step(self, optimizer: Optimizer, raw: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Step all parameters that have a gradient."""
        state = optimizer.state
        pages = [self._page_of(p) for g in optimizer.param_groups for p in g["params"]]
        known = {id(page.param) for page in pages}
        for gone in self._pages.keys() - known:
            self._pages.pop(gone).forget()
        before = len(state)
        todo = [page for page in pages if page.param.grad is not None]
        for page in todo:
            page.adopt(state.get(page.param, {}))
        result = self._step_chunks(optimizer, raw, args, kwargs, todo)
        if len(state) != before:
            # Checkpoints compare their order between ranks.
            for page in pages:
                if page.param in state:
                    state[page.param] = state.pop(page.param)
        return result

    def _step_chunks(
        self,
        optimizer: Optimizer,
        raw: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        todo: list[Page],
    ) -> Any:
        chunks = [*chunks_of(todo, self._options.chunk_bytes)] or [[]]
        result = None
        try:
            self._read(chunks, 0)
            self._bring(chunks, 0)
            self._read(chunks, 1)
            for number, chunk in enumerate(chunks):
                if number >= 2:  # no more buffers than these if the disk is slow
                    for page in chunks[number - 2]:
                        page.wait()
                self._read(chunks, number + 2)
                self._bring(chunks, number + 1)
                for page in chunk:
                    page.use(self._copies_of(page))
                result = self._step_chunk(optimizer, raw, args, kwargs, chunk)
                for page in chunk:
                    page.send(self._copies_of(page))
                if number:
                    self._finish(chunks[number - 1])
            self._finish(chunks[-1])
            for page in todo:
                page.wait()
        except BaseException:
            self._give_up(todo)
            raise
        finally:
            for copies in self._copies.values():
                if copies is not None:
                    copies.synchronize()  # the host may look at the state now
        return result

    def _read(self, chunks: list[list[Page]], number: int) -> None:
        for page in chunks[number] if number < len(chunks) else ():
            page.read(self._readers)

    def _bring(self, chunks: list[list[Page]], number: int) -> None:
        for page in chunks[number] if number < len(chunks) else ():
            page.bring(self._copies_of(page))

    def _finish(self, chunk: list[Page]) -> None:
        for page in chunk:
            page.finish(self._copies_of(page), self._writers)

    def _give_up(self, todo: list[Page]) -> None:
        """After an error: what was stepped is where it belongs, and nothing is under way."""
        for page in todo:
            copies = self._copies_of(page)
            with suppress(OSError):  # of the disk, as perhaps the first error
                page.wait()
            page.use(copies)
            page.send(copies)
            page.finish(copies, self._writers)
            with suppress(OSError):
                page.wait()

    def _step_chunk(
        self,
        optimizer: Optimizer,
        raw: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        chunk: list[Page],
    ) -> Any:
        """Let the optimizer see this part as all that there is."""
        state = optimizer.state
        here = {id(page.param): page for page in chunk}
        inner: defaultdict[Tensor, Any] = defaultdict(dict)
        for page in chunk:
            if page.param in state:
                inner[page.plain] = page.enter(state[page.param])
            else:
                page.enter({})
        groups = optimizer.param_groups
        shown = [
            {**g, "params": [here[id(p)].plain for p in g["params"] if id(p) in here]}
            for g in groups
        ]
        options = [{k: v for k, v in g.items() if k != "params"} for g in shown]
        attributes = remembered_attributes(optimizer)
        optimizer.param_groups, optimizer.state = shown, inner
        try:
            result = raw(optimizer, *args, **kwargs)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            for page in chunk:
                page.hide()
        who = original_name(optimizer)
        for page in chunk:
            found = inner.pop(page.plain, None)
            if found or page.param in state:
                page.leave(found or {}, state[page.param], who)
        self._check_unchanged(optimizer, who, options, shown, attributes, inner)
        return result

    def _check_unchanged(
        self,
        optimizer: Optimizer,
        who: str,
        options: list[dict[str, Any]],
        shown: list[dict[str, Any]],
        attributes: dict[str, Any],
        inner: dict[Any, Any],
    ) -> None:
        names = [
            name
            for before, now in zip(options, shown, strict=True)
            for name in now
            if name != "params" and before.get(name, self) is not now[name]
        ]
        now = remembered_attributes(optimizer)
        names += [name for name in now if attributes.get(name, self) is not now[name]]
        if names or inner:
            what = ", ".join(names) or "an extra entry in its state"
            raise TypeError(
                f"{who} keeps what it remembers outside of the state of its parameters ({what}), "
                "and would do so once for each part: its state cannot be offloaded"
            )

    def _page_of(self, param: Tensor) -> Page:
        page = self._pages.get(id(param))
        if page is None or page.param is not param or page.source is not local_part(param):
            if page is not None:
                page.forget()
            page = self._pages[id(param)] = Page(param, self._options, self.counts)
        return page

    def _copies_of(self, page: Page) -> CopyStream | None:
        device = page.source.device
        if device not in self._copies:
            self._copies[device] = copy_stream_for(device)
        return self._copies[device]
