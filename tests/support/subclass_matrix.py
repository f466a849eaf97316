"""The table of docs/subclasses.md: which tensor subclasses train and resume in which settings.

Rows are models (`subclass_models`), columns are settings. `outcome` says what a cell must be, the
tests run each cell, and `table` writes it down (`make subclasses`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import checkpoint, fully_shard, shard_model
from harness import cached_mesh
from reference import own_part
from subclass_models import ROWS, SIZE
from subclasses import plain_values, two_tensor_methods

STEPS = 4
# Rows of the first weight: 3 ranks divide the one, and hold 32, 32 and 30 of the other. All begin
# where a vector instruction does, so what is left for scalar ones, which round differently, is what
# it is on one process.
EVEN, UNEVEN = 96, 94
# Cut in blocks of 16, they hold 32, 32 and 16 of these, where `torch.chunk` gives 27, 27 and 26.
IN_BLOCKS = 80


@dataclass(frozen=True)
class Setting:
    """A column, or one half of it.

    Attributes:
        ranks: number of ranks; 4 are two replicas of two shards where ``hybrid``.
        options: of `fully_shard`.
        micro_batches: of a step; ``reduces``: after each of them, not only after the last.
        dim: the dim to shard. ``strategy``: of `shard_model`, in place of `fully_shard`.
        in_blocks: shard in blocks of as many rows as the row says.
    """

    ranks: int
    hybrid: bool = False
    hidden: int = EVEN
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    reduces: bool = False
    dim: int = 0
    strategy: str = ""
    in_blocks: bool = False


TRAINING = {
    "1 rank": Setting(1),
    "2 ranks": Setting(2),
    "3 ranks": Setting(3),
    "3 ranks, uneven": Setting(3, hidden=UNEVEN),
    "3 ranks, in blocks": Setting(3, hidden=IN_BLOCKS, in_blocks=True),
    "HSDP, 2 x 2": Setting(4, hybrid=True),
    "not resharded": Setting(2, options={"reshard_after_forward": False}),
    "resharded to 2 of 4": Setting(4, options={"reshard_after_forward": 2}),
    "accumulated": Setting(2, micro_batches=2),
    "reduced each time": Setting(2, micro_batches=2, reduces=True),
    "`Shard(1)`": Setting(2, dim=1),
    "replicated": Setting(2, strategy="none"),
}
RESUMING = {
    "1 to 2": (Setting(1), Setting(2)),
    "2 to 3": (Setting(2), Setting(3)),
    "3 to 1": (Setting(3), Setting(1)),
    "2 to HSDP": (Setting(2), Setting(4, hybrid=True)),
    "HSDP to 2": (Setting(4, hybrid=True), Setting(2)),
    "2 to 3, uneven": (Setting(2, hidden=UNEVEN), Setting(3, hidden=UNEVEN)),
    "2 to 3, in blocks": (
        Setting(2, hidden=IN_BLOCKS),
        Setting(3, hidden=IN_BLOCKS, in_blocks=True),
    ),
}

# What a cell must be where it is not equal to one process bit for bit. A number: losses are equal
# within it, relatively, and gradients and parameters within a hundred times that. None: nothing to
# run. Text: the error.
_SPLITS = "cannot be split into shards of"
_BLOCKS = "its blocks do not end after"
_EXCEPTIONS: dict[tuple[str, str], float | str | None] = {
    ("NF4 with LoRA", "3 ranks, uneven"): _SPLITS,
    ("NF4 with LoRA", "`Shard(1)`"): _SPLITS,
    ("NF4 with LoRA", "2 to 3, uneven"): _SPLITS,
    # (Into equal parts only.)
    ("NF4 with LoRA", "3 ranks, in blocks"): _SPLITS,
    ("NF4 with LoRA", "2 to 3, in blocks"): _SPLITS,
    ("int8 weights", "`Shard(1)`"): _SPLITS,
    ("own class, pads itself", "`Shard(1)`"): None,  # it pads rows
    # It pads to as many as `torch.chunk` gives.
    ("own class, pads itself", "3 ranks, in blocks"): None,
    ("own class, pads itself", "2 to 3, in blocks"): None,
    # The mean of the ranks' means, of which one is over fewer rows.
    ("BitNet", "3 ranks, uneven"): 1e-2,
    ("BitNet", "2 to 3, uneven"): 1e-2,
    ("BitNet", "3 ranks, in blocks"): 1e-2,
    ("BitNet", "2 to 3, in blocks"): 1e-2,
    # Blocks of 256 or 128 elements: shards of 54 of 160 rows of 96 end within one.
    ("AdamW8bit", "2 to 3, uneven"): _BLOCKS,
    ("AdamW4bit", "2 to 3, uneven"): _BLOCKS,
    ("AdamWFp8", "2 to 3, uneven"): _BLOCKS,
}


def outcome(row: str, column: str) -> float | str | None:
    """What the cell must be, as in `_EXCEPTIONS`; 0: bitwise."""
    if row.startswith("AdamW") and column in TRAINING:
        return None  # the table of docs/optimizers.md
    return _EXCEPTIONS.get((row, column), ROWS[row].tolerance)


# -- one cell, on every rank ----------------------------------------------------------------------


Found = tuple[float, float] | str  # the largest differences, or the error


def train(row: str, column: str) -> Found:
    """Train beside one process; the largest differences of losses, and of what is trained."""
    setting, differences = TRAINING[column], _Differences()
    with two_tensor_methods():
        model, plain = ROWS[row].make(setting.hidden)
        try:
            shard(model, setting, row)
        except ValueError as error:
            return str(error)
        optimizers = [ROWS[row].optimizer(side) for side in (model, plain)]
        for step in range(STEPS):
            reduced: list[Tensor] = []
            for part in range(setting.micro_batches):
                last = part == setting.micro_batches - 1
                model.set_requires_gradient_sync(last or setting.reduces)  # type: ignore[operator]
                x = batch(100 * step + 10 * part + dist.get_rank(), plain)
                differences.of_losses(backward(model, x), backward(plain, x))
                if last or setting.reduces:
                    found = [averaged(grad, setting) for grad in _taken(plain)]
                    reduced = list(map(torch.add, reduced, found)) if reduced else found
            for param, grad in zip(_trained(plain), reduced, strict=True):
                param.grad = grad
            differences.of_gradients(model, plain)
            for optimizer in optimizers:
                step_with(optimizer)
            differences.of_parameters(model, plain)
    return differences.losses, differences.rest


def begin(row: str, column: str, folder: str) -> None:
    """Train for half of the steps and save."""
    setting = RESUMING[column][0]
    with two_tensor_methods():
        model, _ = ROWS[row].make(setting.hidden)
        shard(model, setting, row)
        optimizer = ROWS[row].optimizer(model)
        for number in range(STEPS // 2):
            backward(model, batch(number, model))
            step_with(optimizer)
        checkpoint.Checkpointer(folder).save(1, model=model, optimizer=optimizer)


def go_on(row: str, column: str, folder: str) -> Found:
    """Load and train for the rest, beside one process that trains for all steps."""
    before, setting = RESUMING[column]
    differences = _Differences()
    with two_tensor_methods():
        model, plain = ROWS[row].make(setting.hidden)
        try:
            shard(model, setting, row)
            optimizers = [ROWS[row].optimizer(side) for side in (model, plain)]
            checkpoint.Checkpointer(folder).load(model=model, optimizer=optimizers[0])
        except (ValueError, checkpoint.CheckpointMismatch) as error:
            return str(error)
        if isinstance(outcome(row, column), str):
            return ""  # ranks whose shards end where blocks do: others refuse
        for number in range(STEPS):
            resumed = number >= STEPS // 2
            x = batch(number, plain)  # the same on all ranks
            if resumed:
                differences.of_losses(backward(model, x), backward(plain, x))
            else:
                backward(plain, x)
            for param, grad in zip(_trained(plain), _taken(plain), strict=True):
                ranks = (setting if resumed else before).ranks
                param.grad = _sum([grad] * ranks) / ranks
            for optimizer in optimizers[0 if resumed else 1 :]:
                step_with(optimizer)
        differences.of_parameters(model, plain)
    return differences.losses, differences.rest


def shard(model: nn.Module, setting: Setting, row: str) -> None:
    if setting.strategy:
        shard_model(model, strategy=setting.strategy, wrap=[type(model[0])])  # type: ignore[index]
        return
    options = dict(setting.options)
    if setting.in_blocks:
        options["shard_granularity"] = ROWS[row].block
    if setting.hybrid:
        options["mesh"] = cached_mesh(2, 2, names=("replicate", "shard"))
    if setting.dim:
        options["shard_placement_fn"] = lambda p: Shard(setting.dim) if p.ndim == 2 else None
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    fully_shard(model, **options)


def batch(seed: int, like: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    is_double = next(like.parameters()).dtype == torch.float64
    x = torch.randn(8, SIZE, generator=generator, dtype=torch.float64)
    return x if is_double else x.float()


def backward(model: nn.Module, x: Tensor) -> float:
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return float((loss.a if isinstance(loss, TwoTensor) else loss).detach())


def step_with(optimizer: torch.optim.Optimizer) -> None:
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        optimizer.step()
    optimizer.zero_grad()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _taken(plain: nn.Module) -> list[Tensor]:
    """Its gradients, which it has no more."""
    grads = [param.grad for param in _trained(plain) if param.grad is not None]
    for param in _trained(plain):
        param.grad = None
    return grads


def averaged(grad: Tensor, setting: Setting) -> Tensor:
    """The average over the ranks, summed in the order of the groups: shards, then replicas."""
    parts = [torch.empty_like(grad) for _ in range(setting.ranks)]
    dist.all_gather(parts, grad.contiguous())
    if setting.hybrid:
        parts = [_sum(parts[:2]), _sum(parts[2:])]
    return _sum(parts) / setting.ranks


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _Differences:
    """The largest differences that were found, relative to the largest value of each tensor."""

    def __init__(self) -> None:
        self.losses = self.rest = 0.0

    def of_losses(self, mine: float, theirs: float) -> None:
        self.losses = max(self.losses, abs(mine - theirs) / abs(theirs))

    def of_gradients(self, model: nn.Module, plain: nn.Module) -> None:
        for mine, theirs in zip(_trained(model), _trained(plain), strict=True):
            assert theirs.grad is not None
            self._of(mine.grad, theirs.grad)

    def of_parameters(self, model: nn.Module, plain: nn.Module) -> None:
        for mine, theirs in zip(_trained(model), _trained(plain), strict=True):
            self._of(mine, theirs)

    def _of(self, mine: Any, theirs: Tensor) -> None:
        assert isinstance(mine, DTensor)
        whole = values(theirs.detach())
        part, local = own_part(whole, mine), values(mine.detach()._local_tensor)
        assert part.shape == local.shape
        if not torch.equal(part, local):
            largest = float((part - local).abs().max() / whole.abs().max())
            # (A NaN must not get lost in a maximum.)
            self.rest = max(self.rest, largest) if largest == largest else float("inf")


def values(tensor: Any) -> Tensor:
    """What a tensor of one of these classes stands for."""
    for name in ("_data", "_tensor"):  # torchao's
        if hasattr(tensor, name):
            return getattr(tensor, name)
    if hasattr(tensor, "int_data"):
        return tensor.dequantize()
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = plain_values(tensor)
    return tensor


# -- the table on paper ---------------------------------------------------------------------------

BEGIN, END = "<!-- subclasses:begin -->", "<!-- subclasses:end -->"


def table() -> str:
    """All cells: rows that are alike are one, and so are settings with the same outcome."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        alike.setdefault((summary(row, TRAINING), summary(row, RESUMING)), []).append(row)
    lines = ["| class | training | resuming |", "|---|---|---|"]
    lines += [f"| {'; '.join(rows)} | {' | '.join(texts)} |" for texts, rows in alike.items()]
    settings = [f"{name}: {_listed(columns)}." for name, columns in _COLUMNS.items()]
    return "\n".join([*lines, "", "\\\n".join(settings)])


_COLUMNS: dict[str, dict[str, Any]] = {
    "Training settings": TRAINING,
    "Ranks before and after resuming": RESUMING,
}


def summary(row: str, columns: dict[str, Any]) -> str:
    """The outcome of most settings, and the settings with another one."""
    found: dict[str, list[str]] = {}
    for column in columns:
        found.setdefault(_text(outcome(row, column)), []).append(column)
    usual = max(found, key=lambda text: len(found[text]))
    others = [f"{text}: {_listed(found[text])}" for text in found if text != usual]
    return "; ".join([usual, *others])


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(column.replace(",", "") for column in columns)


def _text(cell: float | str | None) -> str:
    if cell is None:
        return "does not apply"
    if isinstance(cell, str):
        return "refused"
    return f"within {cell:g}" if cell else "equal"


def written(page: str) -> str:
    """The page with the table as it is here."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    assert begin, "the page has no place for the table"
    assert end, "the page has no place for the table"
    return f"{before}{begin}{table()}{end}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(written(file.read_text()))
