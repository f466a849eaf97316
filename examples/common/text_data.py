"""The training text, the order of its batches, and n-gram models as baselines.

Text is bytes. Of a folder, every twentieth file is held out; of a single file (or a few), the last
twentieth. The n-gram models only count; they are evaluated on the same held-out bytes.
"""

from __future__ import annotations

import itertools
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_EVERY = 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", ".git"}
# In the standard library, also skip folders of tables, which are not source.
TABLE_FOLDERS = {"encodings", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """Training and held-out bytes, each a 1-D uint8 tensor, and the name of their source."""

    train: Tensor
    held_out: Tensor
    source: str


def read_text(path: Path | None) -> Text:
    """Read a file, a folder, or (None) the source of Python's own standard library.

    Raises:
        ValueError: there is too little text at `path`.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        source = "the Python standard library"
        contents = _read_folder(root, "*.py", SKIPPED_FOLDERS | TABLE_FOLDERS)
    else:
        source = str(path)
        contents = (
            _read_folder(path, "*", SKIPPED_FOLDERS) if path.is_dir() else [path.read_bytes()]
        )
    if len(contents) < 2 * HELD_OUT_EVERY:
        whole = b"".join(contents)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        train, held_out = whole[:cut], whole[cut:]
    else:
        held_out = b"".join(contents[::HELD_OUT_EVERY])
        train = b"".join(c for i, c in enumerate(contents) if i % HELD_OUT_EVERY)
    if len(held_out) < 1024:
        raise ValueError(f"{source} has too little text: {len(train) + len(held_out):,} bytes")
    return Text(_as_tensor(train), _as_tensor(held_out), source)


def _read_folder(root: Path, pattern: str, skipped: set[str]) -> list[bytes]:
    """The content of every text file under `root`, in the same order on every rank."""
    files = sorted(
        f
        for f in root.rglob(pattern)
        if f.is_file() and skipped.isdisjoint(f.relative_to(root).parts)
    )
    contents = [f.read_bytes() for f in files]
    # Skip binary files, which have NUL bytes.
    return [c for c in contents if c and b"\0" not in c]


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward of a rank.

    Attributes:
        inputs, targets: each (sequences, length) int64.
        weight: the factor of its mean loss. Summed over a rank's micro-batches and averaged over
            ranks, the weighted losses are the mean over all sequences of the step.
    """

    inputs: Tensor
    targets: Tensor
    weight: float


class Batches:
    """An endless stream of training windows that does not depend on the number of ranks.

    The text is cut into windows of `length + 1` bytes (the targets are the inputs shifted by one),
    which are shuffled in every epoch. Each call takes the next windows and returns this rank's
    part: `next` takes `batch * num_ranks` windows, `of_step` takes its argument. Save and restore
    `position`, the number of windows that all ranks together have taken.
    """

    def __init__(
        self, text: Tensor, *, length: int, batch: int, rank: int, num_ranks: int, seed: int
    ) -> None:
        self.num_windows = (text.numel() - 1) // length
        if self.num_windows < batch * num_ranks:
            raise ValueError(f"{text.numel():,} bytes are too few for one batch")
        self.text = text
        self.length, self.batch = length, batch
        self.rank, self.num_ranks, self.seed = rank, num_ranks, seed
        self.position, self.forwards = 0, 1  # of the last step
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank, each (batch, length) int64."""
        first = self.position + self.rank * self.batch
        starts = [self._window(i) * self.length for i in range(first, first + self.batch)]
        self.position += self.batch * self.num_ranks
        return windows_at(self.text, starts, self.length)

    def of_step(self, sequences: int) -> list[MicroBatch]:
        """This rank's part of the next `sequences` windows, in micro-batches of at most `batch`.

        The step has the same windows on any number of ranks. If they do not divide evenly, some
        ranks have one more than others. A forward is collective, so all ranks run the same number
        of forwards: a rank without further windows takes one with weight 0.
        """
        bounds = even_parts(sequences, self.num_ranks)
        first, last = bounds[self.rank], bounds[self.rank + 1]
        largest = max(b - a for a, b in itertools.pairwise(bounds))
        parts = even_parts(last - first, -(-largest // self.batch))
        found = []
        for a, b in itertools.pairwise(parts):
            taken = range(self.position + first + a, self.position + first + max(b, a + 1))
            starts = [self._window(i) * self.length for i in taken]
            # Gradients are averaged over ranks, so each rank's gradients count 1 / num_ranks.
            weight = (b - a) * self.num_ranks / sequences
            found.append(MicroBatch(*windows_at(self.text, starts, self.length), weight))
        self.position += sequences
        self.forwards = len(found)
        return found

    def _window(self, index: int) -> int:
        epoch, offset = divmod(index, self.num_windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch = epoch
            self._order = torch.randperm(self.num_windows, generator=generator)
        return int(self._order[offset])


def even_parts(count: int, num_parts: int) -> list[int]:
    """The bounds of `num_parts` parts of `count` items; their sizes differ by at most 1."""
    return [count * i // num_parts for i in range(num_parts + 1)]


def windows_at(text: Tensor, starts: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), length) int64, of the windows at `starts`."""
    windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def validation_starts(held_out: Tensor, length: int, max_bytes: int) -> list[int]:
    """The starts of the validation windows, spread evenly over the held-out text."""
    available = (held_out.numel() - 1) // length
    wanted = max(1, min(available, max_bytes // length))
    return [i * available // wanted * length for i in range(wanted)]


def ngram_bits_per_byte(text: Text, order: int, targets: Tensor) -> float:
    """Bits per byte of an n-gram model on held-out bytes.

    It counts on the training text and mixes the orders from uniform up to `order` by
    Witten-Bell interpolation, which has no hyperparameter: with `c` the count of a context and
    `t` the number of different bytes seen after it, the shorter context gets the weight
    t / (c + t).

    Args:
        text: the text; only `text.train` is counted.
        order: 2 for a bigram model (one byte of context), 3 for a trigram model.
        targets: positions in `text.held_out` of the bytes to predict.
    """
    train, held_out = text.train, text.held_out
    probability = torch.full((targets.numel(),), 1 / 256, dtype=torch.float64)
    for n in range(1, order + 1):
        counts = torch.bincount(_ngram_codes(train, n), minlength=256**n).view(-1, 256)
        totals, distinct = counts.sum(1), counts.count_nonzero(1)
        code = torch.zeros_like(targets)
        for back in range(n - 1, -1, -1):
            # The context before the first byte is NUL, for all models.
            at = targets - back
            byte = torch.where(at >= 0, held_out[at.clamp(min=0)].long(), 0)
            code = code * 256 + byte
        context = code // 256
        seen = counts[context, code % 256] + distinct[context] * probability
        known = totals[context] + distinct[context]
        probability = torch.where(known > 0, seen / known.clamp(min=1), probability)
    return float(-probability.log().mean()) / math.log(2)


def _ngram_codes(text: Tensor, n: int) -> Tensor:
    """Every sequence of `n` bytes as one number, base 256."""
    count = text.numel() - n + 1
    code = torch.zeros(count, dtype=torch.int32)
    for i in range(n):
        code = code * 256 + text[i : i + count]
    return code
