"""Makes missing waits between streams show on a real device: NaNs and delays.

Gathered storage, gradients and buffers are NaN from when they have memory until they are written,
and again before they are freed. On CUDA, the streams of communication and compute spin for random
times. A collective that is not ordered behind what it needs, or memory that is freed too early,
then gives NaNs or other numbers, where a GPU would mostly be right by luck. The device of
`testdev` does as much by itself, with an allocator and kernels that are not a GPU's.

With ``FSDP2_TEST_CHAOS=seed`` pytest's process and every rank of `harness` begin with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fsdp2.comm.streams import DeviceStreams
from fsdp2.sharding import gathered

DELAYED = ("gathering", "reducing", "all_reducing")
PROBABILITY = 0.3
MAX_CYCLES = 1_500_000  # about 1 ms


def install(seed: int) -> None:
    """From now on, for the rest of this process. Before models are sharded."""
    gathered.resizers.append(_filling(gathered.resizers[-1]))
    rng = random.Random(seed)
    for name in DELAYED:
        setattr(DeviceStreams, name, _late(getattr(DeviceStreams, name), rng))
    use_gathered = DeviceStreams.use_gathered

    def use_gathered_late(self: DeviceStreams, event: Any) -> None:
        use_gathered(self, event)
        _delay(rng)

    setattr(DeviceStreams, "use_gathered", use_gathered_late)  # noqa: B010 (mypy: a method)


def _filling(resize: Callable[..., object]) -> Callable[[torch.UntypedStorage, int], None]:
    """On the current stream: behind what that has waited for, and behind nothing else."""

    def resize_and_fill(storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes == 0:
            _fill(storage)
        is_new = storage.nbytes() == 0
        resize(storage, nbytes)
        if is_new:
            _fill(storage)

    return resize_and_fill


def _fill(storage: torch.UntypedStorage) -> None:
    if storage.nbytes():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        whole.fill_(0xFF)  # NaN in every dtype of floating point


def _late(
    context: Callable[..., AbstractContextManager[None]], rng: random.Random
) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def late(self: DeviceStreams, *args: Any, **kwargs: Any) -> Any:
        with context(self, *args, **kwargs):
            _delay(rng)
            yield
            _delay(rng)

    return late


def _delay(rng: random.Random) -> None:
    late = rng.random() < PROBABILITY
    if late and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda._sleep(int(rng.random() * MAX_CYCLES))
