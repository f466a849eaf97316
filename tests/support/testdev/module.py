"""``torch.testdev``: what torch expects of the module of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

NAME = "testdev"


class Stream(torch.Stream):
    """A queue with a thread of its own. `priority` is ignored."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if not kwargs:
            return super().__new__(cls, device=NAME, priority=0)
        return super().__new__(cls, **kwargs)

    def wait_stream(self, other: torch.Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event(torch.Event):
    """Makes events of torch's class: ``elapsed_time`` takes no others, not even of a subclass."""

    def __new__(cls, enable_timing: bool = False, **kwargs: Any) -> Any:
        return torch.Event(NAME, enable_timing=True)


def make(native: Any) -> ModuleType:
    """The module, on top of the built library."""
    module = ModuleType(f"torch.{NAME}")

    def stream_of(number: int) -> Stream:
        return Stream(stream_id=number, device_index=0, device_type=_device_type())

    def current_stream(device: Any = None) -> Stream:
        return stream_of(native.current_stream())

    def set_stream(stream: torch.Stream) -> None:
        native.exchange_current_stream(stream.stream_id)

    @contextlib.contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = native.exchange_current_stream(chosen.stream_id)
        try:
            yield
        finally:
            native.exchange_current_stream(before)

    @contextlib.contextmanager
    def device(chosen: Any) -> Iterator[None]:
        yield

    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        return native.default_generator().get_state()

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        native.default_generator().set_state(state)

    def manual_seed(seed: int) -> None:
        native.default_generator().manual_seed(seed)

    def statistic(name: str) -> Any:
        return lambda device=None: native.memory_stats()[name]

    vars(module).update(
        Stream=Stream,
        Event=Event,
        current_stream=current_stream,
        default_stream=lambda device=None: stream_of(0),
        set_stream=set_stream,
        stream=stream,
        device=device,
        synchronize=lambda device=None: native.synchronize(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # without it, activation checkpointing keeps no random state
        init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: NAME,
        _is_in_bad_fork=lambda: False,
        is_current_stream_capturing=lambda: False,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_stats=lambda device=None: native.memory_stats(),
        memory_allocated=statistic("allocated_bytes.all.current"),
        max_memory_allocated=statistic("allocated_bytes.all.peak"),
        memory_reserved=statistic("reserved_bytes.all.current"),
        max_memory_reserved=statistic("reserved_bytes.all.peak"),
        reset_peak_memory_stats=lambda device=None: native.reset_peaks(),
        empty_cache=native.empty_cache,
        native=native,
    )
    return module


def _device_type() -> int:
    return torch.Stream(device=NAME).device_type
