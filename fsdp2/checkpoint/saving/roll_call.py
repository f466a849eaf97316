"""Which ranks have called a save: distinguishes a slow rank from one that never calls.

A save communicates nothing, so a program that calls it on one rank only would not notice: that
rank's part is written, and the checkpoint is never committed. So every call sets one key in the
process group's key-value store. The keys are read only while a save waits for other ranks.
"""

from __future__ import annotations

import atexit
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from ..agreement import next_nonce, the_store
from ..errors import CheckpointError
from .attempt import Attempt

# How far apart ranks may call save before there is a warning, and at the next save an error.
PATIENCE_S = 30.0
EXIT_WAIT_S = 5.0  # for ranks that are still writing when this process ends


class RollCall:
    """One save, as called by this rank.

    Args:
        target: where the checkpoint will be.
        rank, ranks: this rank and all that take part.

    Attributes:
        nonce: of the attempt.
    """

    def __init__(self, target: Path, rank: int, ranks: tuple[int, ...]) -> None:
        self.target, self.rank, self.ranks = target, rank, ranks
        self.nonce = next_nonce(target, ranks)
        self._key = f"fsdp2/called/{target}/{self.nonce}"
        self.warned = False

    @contextmanager
    def called(self) -> Iterator[None]:
        """Wraps what a rank does before it stages anything: the other ranks learn that it called,
        and whether it failed here."""
        self._answer(str(self.rank), "called")
        try:
            yield
        except BaseException as error:
            self.refuse(error)
            raise

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and will never mark its part."""
        self._answer("refused", json.dumps([self.rank, f"{type(error).__name__}: {error}"]))

    def _answer(self, key: str, value: str) -> None:
        store = self._store()
        if store is not None:
            with suppress(RuntimeError):  # the store may be gone while the program exits
                store.set(f"{self._key}/{key}", value)

    def _store(self) -> dist.Store | None:
        return None if len(self.ranks) == 1 else the_store()

    def absent(self) -> list[int] | None:
        """Ranks that have not called this save; None if there is no store (any more) to ask."""
        store = self._store()
        try:
            if store is not None:
                return [r for r in self.ranks if not store.check([f"{self._key}/{r}"])]
        except RuntimeError:
            pass
        return None

    def check_refused(self, attempt: Attempt) -> None:
        """Check that no rank failed without a note in the folder.

        Raises:
            CheckpointError: with the reason; this save can never be committed.
        """
        store, said = self._store(), None
        with suppress(RuntimeError):  # the store may be gone, and with it what it knew
            if store is not None and store.check([f"{self._key}/refused"]):
                said = store.get(f"{self._key}/refused").decode()
        if said is not None:
            rank, reason = json.loads(said)
            attempt.give_up(reason, rank)  # for it: it may not even have known of a folder
            raise CheckpointError(
                f"{self.target} will not be committed: rank {rank} failed: {reason}"
            )

    def forget(self) -> None:
        """Remove this rank's key, once the checkpoint is committed."""
        store = self._store()
        if store is not None:
            with suppress(RuntimeError):
                store.delete_key(f"{self._key}/{self.rank}")

    # -- messages ---------------------------------------------------------------------------

    def why(self, attempt: Attempt) -> str:
        """Why the checkpoint is not committed yet, and what to do."""
        absent, unfinished = self.absent(), attempt.unfinished()
        if not absent and not unfinished:
            return "all ranks have finished, and another one is committing it"
        if absent == []:
            return f"{_listed(unfinished)} called save and did not finish writing: slow, or ended"
        missing = (
            f"{_listed(absent)} never called save for it"
            if absent
            else f"nothing of {_listed(unfinished)} is there"
        )
        return (
            f"{missing}. All {len(self.ranks)} ranks must call save for the same steps, since each "
            "writes the shards that it holds: do not put it under `if rank == 0`. (For a model "
            "that one rank holds whole, pass ranks=[0] to save_model or Checkpointer)"
        )

    def warn_once(self, waited_s: float, attempt: Attempt) -> None:
        """Warn, once, for which ranks this one waits, after `PATIENCE_S`."""
        # Also for those that have called: one that died looks like one that writes much.
        if not self.warned and waited_s > PATIENCE_S and (self.absent() or attempt.unfinished()):
            self.warned = True
            warnings.warn(
                f"{self.target} is not committed after {waited_s:.0f} s: {self.why(attempt)}",
                stacklevel=4,
            )

    def check_all_called(self, attempt: Attempt, since: float) -> None:
        """Wait until all ranks have called, at most until `PATIENCE_S` after ``since``.

        Raises:
            CheckpointError: naming the ranks that have not.
        """
        while not attempt.commit() and self.absent():
            if time.monotonic() - since > PATIENCE_S:
                raise CheckpointError(f"{self.target} was never committed: {self.why(attempt)}")
            time.sleep(0.02)


def _listed(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


# -- when the process ends ----------------------------------------------------------------------

_open_ends: dict[int, tuple[RollCall, Attempt, BaseException | None]] = {}


def left_open(call: RollCall, attempt: Attempt, error: BaseException | None) -> None:
    """Note that this rank finished a save that is not committed or failed, which the program has
    not been told yet."""
    _open_ends[id(attempt)] = call, attempt, error


def settled(attempt: Attempt) -> None:
    """Note that an attempt was committed, or that its error was raised."""
    _open_ends.pop(id(attempt), None)


@atexit.register
def _warn_at_exit() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for call, attempt, failure in list(_open_ends.values()):
        why = "" if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            while not why and not attempt.commit():
                if time.monotonic() > deadline:
                    why = call.why(attempt)
                time.sleep(0.02)
        except (OSError, CheckpointError) as error:
            why = str(error)
        if why:
            warnings.warn(
                f"{call.target} is not committed as rank {call.rank} ends: {why}", stacklevel=1
            )
    _open_ends.clear()
