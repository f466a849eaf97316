"""Slips of a new user with checkpoints: each error names the thing and what to do."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import fsdp2
from example_runs import EXAMPLES
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CorruptCheckpoint,
    load_model,
    peek,
    save_model,
)
from fsdp2.checkpoint.format.disk import Disk
from harness import ours_only

pytestmark = ours_only("checkpoints")


def test_a_step_that_is_no_number_is_answered_with_the_steps_there_are(tmp_path: Path) -> None:
    model, checkpoints = nn.Linear(2, 2), Checkpointer(tmp_path)
    checkpoints.save(3, model=model)
    checkpoints.save(5, model=model)
    with pytest.raises(ValueError, match=r"'latest', got 'lastest'; the last steps in .*: 3, 5"):
        checkpoints.load("lastest", model=model)
    with pytest.raises(ValueError, match=r"'latest', got 'lastest'; the last steps in .*: 3, 5"):
        peek(tmp_path, "lastest")


def test_what_does_not_fit_is_answered_with_arguments_that_exist(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatch, match="or names= to translate names"):
        checkpoints.load(model=other)
    with pytest.raises(CheckpointMismatch, match="or names= to translate names"):
        load_model(other, tmp_path / "step-000001")


def test_a_pickled_file_is_answered_with_how_to_load_it(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    with pytest.raises(
        CheckpointError, match=r"weights\.pt is a pickled file.*torch\.load"
    ) as found:
        load_model(model, path)
    assert not isinstance(found.value, CorruptCheckpoint)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Checkpointer's folder (`run`), a checkpoint of weights, and what others wrote."""
    top, model = tmp_path_factory.mktemp("slips"), two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(top / "run") as checkpoints:
        checkpoints.save(1, model=model)
        checkpoints.save(2, model=model, optimizer=optimizer)
    save_model(model, top / "weights")
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    save_file(wrapped, top / "wrapped.safetensors")
    torch.save(model.state_dict(), top / "pickle.safetensors")
    (top / "text.safetensors").write_text("no tensors in here")
    for folder, file in (("dcp", ".metadata"), ("hub", "pytorch_model.bin"), ("empty", "x")):
        (top / folder).mkdir()
        (top / folder / file).touch()
    return top


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def prefixed() -> nn.Module:
    return nn.ModuleDict({"module": two_layers()})


def other_optimizer(top: Path) -> object:
    model = two_layers()
    return Checkpointer(top / "run").load(
        model=model, optimizer=torch.optim.AdamW(two_layers().parameters())
    )


def scheduler(top: Path) -> object:
    model = two_layers()
    made = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    return Checkpointer(top / "run").load(model=model, scheduler=made)


SLIPS: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (
        lambda top: load_model(two_layers(), top / "wights"),
        CheckpointNotFound,
        "wights does not exist: did you mean 'weights'",
    ),
    (
        lambda top: load_model(two_layers(), top / "run" / "step-00001"),
        CheckpointNotFound,
        "step-00001 does not exist: did you mean 'step-000001'",
    ),
    (
        lambda top: load_model(two_layers(), "no-such-folder"),
        CheckpointNotFound,
        r"^/.*/no-such-folder does not exist$",
    ),
    (
        lambda top: load_model(two_layers(), "meta-llama/Llama-3.2-1B"),
        CheckpointNotFound,
        r"does not exist\. If it .*: hf download meta-llama/Llama-3\.2-1B --local-dir FOLDER",
    ),
    (
        lambda top: Checkpointer(top / "run").load("step-000001", model=two_layers()),
        ValueError,
        r"got 'step-000001'; .*: did you mean 1\?$",
    ),
    (
        lambda top: Checkpointer(top / "runs").load(model=two_layers()),
        CheckpointNotFound,
        r"runs has no committed checkpoint: did you mean 'run'\?$",
    ),
    (lambda top: peek(top / "rum"), CheckpointNotFound, r"no such folder: did you mean 'run'\?$"),
    (
        lambda top: load_model(two_layers(), top / "run"),
        CheckpointNotFound,
        r"folder of a Checkpointer: give one of its steps \(.*step-000002\)",
    ),
    (
        lambda top: Checkpointer(top / "weights").load(model=two_layers()),
        CheckpointNotFound,
        "it is itself a checkpoint",
    ),
    (
        lambda top: Checkpointer(top / "run" / "step-000001").load(model=two_layers()),
        CheckpointNotFound,
        "it is itself a checkpoint",
    ),
    (
        lambda top: Checkpointer(top / "run").load(7, model=two_layers()),
        CheckpointNotFound,
        "no committed step 7; the last ones: 1, 2",
    ),
    (lambda top: Checkpointer(top / "run").load(1.5, model=two_layers()), ValueError, "got 1.5"),
    (
        lambda top: Checkpointer(top / "run").load(two_layers()),
        TypeError,
        r"got a Sequential; other arguments are keywords: load\(model=model\)$",
    ),
    (
        lambda top: Checkpointer(top / "run").save(two_layers(), model=two_layers()),
        ValueError,
        "step must be an integer of at least 0, got a Sequential$",
    ),
    (lambda top: peek(top / "none"), CheckpointNotFound, "there is no such folder"),
    (
        lambda top: load_model(two_layers(), top / "pickle.safetensors"),
        CorruptCheckpoint,
        r"is a pickled file, not safetensors.*torch\.load",
    ),
    (
        lambda top: load_model(two_layers(), top / "text.safetensors"),
        CorruptCheckpoint,
        "is not a safetensors file: header length",
    ),
    (
        lambda top: load_model(two_layers(), top / "dcp"),
        CheckpointNotFound,
        r"torch\.distributed\.checkpoint.*dcp_to_torch_save",
    ),
    (
        lambda top: Checkpointer(top / "dcp").load(model=two_layers()),
        CheckpointNotFound,
        r"torch\.distributed\.checkpoint",
    ),
    (
        lambda top: load_model(two_layers(), top / "hub"),
        CheckpointNotFound,
        "but 'pytorch_model.bin', which is a pickled file",
    ),
    (
        lambda top: load_model(two_layers(), top / "empty"),
        CheckpointNotFound,
        "it has no safetensors file$",
    ),
    (
        lambda top: load_model(nn.Sequential(*two_layers(), nn.Linear(4, 4)), top / "weights"),
        CheckpointMismatch,
        r"missing in the checkpoint: \['2.weight', '2.bias'\]\. Pass strict=False",
    ),
    (
        lambda top: load_model(two_layers(), top / "wrapped.safetensors"),
        CheckpointMismatch,
        r"wrapped\.safetensors does not .*in the checkpoint begin with 'module\.': names=",
    ),
    (
        lambda top: load_model(prefixed(), top / "weights"),
        CheckpointMismatch,
        r"Names in the model begin with 'module\.': names=",
    ),
    (
        lambda top: load_model(two_layers(), top / "weights", names={"0.weight": "first"}),
        CheckpointMismatch,
        r"missing in the checkpoint: \['first'\]; unexpected, .*\['0.weight'\]",
    ),
    (
        lambda top: load_model(two_layers().bfloat16(), top / "weights"),
        CheckpointMismatch,
        "F32 in the checkpoint, torch.bfloat16 here.*cast=True",
    ),
    (
        lambda top: load_model(top / "weights", two_layers()),  # type: ignore[arg-type]
        TypeError,
        "The model must be an nn.Module, not of type ",
    ),
    (
        lambda top: save_model(two_layers().state_dict(), top / "x"),  # type: ignore[arg-type]
        TypeError,
        "The model must be an nn.Module, not of type OrderedDict",
    ),
    (
        lambda top: Checkpointer(top / "run").load(
            model=two_layers(),
            optimizer=torch.optim.AdamW,  # type: ignore[arg-type]
        ),
        TypeError,
        "got the class AdamW",
    ),
    (other_optimizer, CheckpointError, "is not a parameter of this model"),
    (scheduler, CheckpointMismatch, "has no schedulers, 1 are to be loaded"),
    (
        lambda top: Checkpointer(top / "text.safetensors" / "b"),
        CheckpointError,
        r"b cannot be made: Not a directory$",
    ),
    (
        lambda top: Checkpointer(top / "text.safetensors"),
        CheckpointError,
        "is a file, not a folder",
    ),
]


@pytest.mark.parametrize(("slip", "kind", "words"), SLIPS)
def test_slips_are_named_and_answered(
    slip: Callable[[Path], object], kind: type[Exception], words: str, folders: Path
) -> None:
    with pytest.raises(kind, match=words):
        slip(folders)


def test_weights_saved_by_a_wrapped_model_are_loaded_as_the_error_says(folders: Path) -> None:
    model = two_layers()
    with torch.no_grad():
        model[0].weight.zero_()
    load_model(model, folders / "wrapped.safetensors", names=lambda name: "module." + name)
    assert torch.equal(model[0].weight, two_layers()[0].weight)
    outer = prefixed()
    load_model(outer, folders / "weights", names=lambda name: name.removeprefix("module."))


def test_a_full_disk_is_named_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "write_at", full)
    sizes = r"\(this rank saves 232 bytes; [\d,]+ are free\)"
    with pytest.raises(OSError, match=f"No space left on device {sizes}: '.*/weights'"):
        save_model(two_layers(), tmp_path / "weights")
    assert not list(tmp_path.iterdir())


def test_what_this_user_may_not_read_is_named(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = os.open

    def refused(path: str, *args: int, **kwargs: int) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", path)
        return inherited(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(
        CheckpointError,
        match=r"weights cannot be read by this user: Permission denied: 'model.safetensors'",
    ):
        load_model(two_layers(), folders / "weights")


def test_parents_of_a_checkpoint_are_made(tmp_path: Path) -> None:
    save_model(two_layers(), tmp_path / "a" / "b" / "weights")
    load_model(two_layers(), tmp_path / "a" / "b" / "weights")
    Checkpointer(tmp_path / "c" / "d" / "run").save(1, model=two_layers())
    with Checkpointer(tmp_path / "c" / "d" / "run") as checkpoints:
        assert checkpoints.load(model=two_layers()).step == 1


def test_all_earlier_runs_of_an_example_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    processes = importlib.import_module("common.processes")
    out = tmp_path / "lm"
    for run in range(3):
        processes.set_earlier_run_aside(str(out))
        (out / "checkpoints").mkdir(parents=True)
        for name in ("checkpoints/step", "losses.jsonl", "summary.json", "other"):
            (out / name).write_text(f"of run {run}")
    for run, folder in enumerate(("lm-2", "lm-3", "lm")):
        for name in ("checkpoints/step", "losses.jsonl", "summary.json"):
            assert (tmp_path / folder / name).read_text() == f"of run {run}"
    assert {path.name for path in tmp_path.glob("*/other")} == {"other"}
    assert (out / "other").exists()
    assert f"is in {tmp_path / 'lm-3'} now" in capsys.readouterr().out


def test_the_example_of_explain_runs_and_dir_lists_what_is_public() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    assert 'explain(Llama(), (8, 8), strategy="hybrid")' in (fsdp2.explain.__doc__ or "")
    assert "64 ranks" in str(fsdp2.explain(model, (8, 8), strategy="hybrid"))
    names = set(dir(fsdp2))
    assert {"checkpoint", "experts", "fully_shard", "materialize", "optim", "wrap"} <= names
    assert not {"runtime", "storage", "unit", "gradients"} & names
    for name in names:
        assert hasattr(fsdp2, name) or importlib.import_module(f"fsdp2.{name}"), name
