"""Checkpoints of an attacker: right tensors or a clear error, bounded memory, nothing outside.

`FSDP2_FUZZ_S` is how many seconds the long test searches (default: 120).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint_cases import Tied, adamw, build, train
from fsdp2.checkpoint import Checkpointer
from harness import ours_only, run_on
from hostile import INDEX, OWN, STEP, Draw, damage, opened, read_all, recorded

pytestmark = ours_only("checkpoints")

LAYOUTS = ["one file", "index", "own", "own of two", "own per rank"]


def save(root: str, layout: str = "shared") -> None:
    import torch.distributed as dist

    model: Any = build("1d") if dist.is_initialized() else Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    if not dist.is_initialized():  # what belongs to this rank alone
        optimizer.state[optimizer.param_groups[0]["params"][0]]["history"] = torch.ones(3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    checkpoints = Checkpointer(root, layout=layout, max_file_bytes=6000)
    extra = {"position": (1, 2), "best": float("inf"), "t": torch.ones(3)}
    checkpoints.save(1, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    state = {n: t.clone() for n, t in Tied().state_dict().items() if n != "head.weight"}
    (root / "one file").mkdir()
    save_file(state, root / "one file" / "model.safetensors", metadata={"format": "pt"})
    (root / "index").mkdir()
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({n: state[n] for n in state if files[n] == file}, root / "index" / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (root / "index" / INDEX).write_text(json.dumps(index))
    save(str(root / "own"))
    run_on(2, save, str(root / "own of two"))
    run_on(2, save, str(root / "own per rank"), "per-rank")
    yield {name: root / name / (STEP if name.startswith("own") else "") for name in LAYOUTS}
    shutil.rmtree(root)


def tree(path: Path) -> dict[str, Any]:
    """Names, kinds, sizes and times of everything under ``path``."""
    found = {}
    for each in sorted(path.rglob("*")):
        status = each.lstat()
        found[str(each)] = status.st_mode, status.st_size, status.st_mtime_ns
    return found


def one_example(draw: Draw, originals: dict[str, Path]) -> None:
    layout = draw.choice(LAYOUTS)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "outside").mkdir()
        (top / "scratch").mkdir()
        own = layout.startswith("own")
        folder = top / "run" / STEP if own else top / "hub"
        shutil.copytree(originals[layout], folder)
        damage(draw, folder, top / "outside")
        before = tree(top)
        before.pop(str(top / "scratch"))
        with recorded():
            read_all(folder, originals[layout], top / "scratch")
        after = tree(top)
        after.pop(str(top / "scratch"))
        # A Checkpointer touches its folder, to see whether all ranks share it.
        for each in (before, after):
            each.pop(str(top / "run"), None)
        assert after == before, "something was written"
        for path, flags in opened:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            assert not (own and os.path.realpath(path).startswith(str(top / "outside"))), path
            assert not (writes and str(top / "outside") in path), path


def search(
    originals: dict[str, Path], examples: int, *, seed: int | None = None, shrink: bool = True
) -> None:
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases,
        derandomize=seed is None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: Any) -> None:
        one_example(Draw(data), originals)

    if seed is not None:
        from hypothesis import seed as seeded

        run = seeded(seed)(run)
    run()


def test_whatever_was_changed_the_answer_is_clear(originals: dict[str, Path]) -> None:
    search(originals, 30)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_whatever_was_changed_for_long(originals: dict[str, Path]) -> None:
    """As many examples as fit into `FSDP2_FUZZ_S` seconds, others each time."""
    end = time.monotonic() + float(os.environ.get("FSDP2_FUZZ_S", "120"))
    seed = int(os.environ.get("FSDP2_FUZZ_SEED", time.time_ns() % 2**32))
    while time.monotonic() < end:
        print("seed", seed)
        search(originals, 200, seed=seed)
        seed += 1


def test_what_was_not_changed_is_read_in_all_ways(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    """Else the search above would prove nothing."""
    for name, path in originals.items():
        scratch = tmp_path / name
        scratch.mkdir()
        folder = scratch.with_suffix(".copy") / (STEP if name.startswith("own") else "")
        shutil.copytree(path, folder)
        done = read_all(folder, path, scratch)
        assert all(ok for what, ok in done.items() if "--with-optimizer" not in what), (name, done)
        assert (folder / OWN).is_dir() == name.startswith("own")
