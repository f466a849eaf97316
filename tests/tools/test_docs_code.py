"""Code and commands in the README and on the pages run, or at least parse.

The first script of the README runs as it stands, on two ranks. Other blocks of Python run on one
rank with the names that examples in docstrings take for given. Of commands, targets and options
have to exist: `make` in the Makefile, `fsdp2` in its parser, others in the file that they run.
"""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fsdp2
import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

from test_docstring_examples import (
    Model,
    given,
    loss,
    one_rank_mesh,
    world_of_one,  # noqa: F401  a fixture
)

import fsdp2.checkpoint
import pages
from example_runs import run_scripts

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
# Those of the tutorial and the guides have tests of their own.
PAGES_OF_DOCS = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if page.parent.name not in ("tutorial", "guides")
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES_OF_DOCS]
COMMANDS_IN = [*PAGES, ROOT / "benchmarks" / "README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Blocks of Python that are not run on one rank, by a line of theirs.
NOT_RUN = {
    "import torch.distributed as dist": "the first script: it has a test of its own",
    '"tensor_ranks": [1, 2, 4, 8]': "it makes a process group, and the pages run in one",
    '"context_ranks": [1, 2, 4, 8]': "the same",
    '"pipeline_ranks": [1, 2, 4, 8]': "its stages are of a model that the reader has",
    "class Module(lightning.LightningModule)": "it has a test: test_ecosystem_lightning.py",
    "Accelerator(gradient_accumulation_steps=4)": "it has a test: test_accelerate.py",
    "setattr(torch.distributed.fsdp, name,": "it would last; client_programs.py has it for tests",
    "@distributed(2, 3)": "a test, as tests are written; it needs the harness",
}


def blocks(page: Path, *languages: str) -> list[str]:
    """The contents of the fenced blocks of these languages; "" is none."""
    return [block.code for block in pages.blocks(page) if block.language in languages]


# ------------------------------------------------------------------------------------------ Python


def test_the_readme_is_a_page() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 170


def test_the_first_script_of_the_readme_trains_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = blocks(ROOT / "README.md", "python")[0]
    assert source.count("\n") <= 40
    script, printed = tmp_path / "first.py", tmp_path / "printed"
    script.write_text(f"{source}if rank == 0:\n    print('data', tokens[0].tolist())\n")
    monkeypatch.chdir(tmp_path)
    again = tmp_path / "again"
    run_scripts(2, [(str(script), [], printed), (str(script), [], again)])
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", printed.read_text())]
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    assert "step 40: loss" in again.read_text()
    first, second = (re.search(r"data .*", page.read_text()) for page in (printed, again))
    assert first is not None
    assert second is not None
    assert first[0] != second[0], "a resumed run trains on the batches of the first run"
    assert fsdp2.checkpoint.Checkpointer(tmp_path / "first-checkpoints").steps() == [20, 40]


def python_blocks() -> dict[str, str]:
    return {
        f"{page.relative_to(ROOT)}-{number}": source
        for page in PAGES
        for number, source in enumerate(blocks(page, "python"), 1)
        if not any(line in source for line in NOT_RUN)
    }


PYTHON = python_blocks()


class Wrapped(nn.Module):
    """With the names of a model of transformers."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.model = Model()


def what_a_page_takes_for_given(source: str) -> dict[str, Any]:
    """Beside what docstrings take for given."""
    tokens = torch.zeros(2, 4, dtype=torch.long)
    sharded = given(source, "page")
    names: dict[str, Any] = {
        "batches": [tokens, tokens],
        "rank": 0,
        "step": 1,
        "train": lambda: None,
        "Transformer": Model,
        "loss": loss,
        "batch": tokens,
    }
    if "scheduler" in source:
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(sharded["optimizer"])
        names["batches"] = SimpleNamespace(position=0)
    if "model.model.layers" in source:
        names["LlamaForCausalLM"] = Wrapped
    return sharded | names


@pytest.mark.parametrize("where", PYTHON)
@pytest.mark.usefixtures("world_of_one")
def test_blocks_of_python_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One rank, and a folder that is there.
    source = PYTHON[where].replace('"h100", 64', '"h100", 1').replace("run/checkpoints", "saved")
    if "from torchao" in source:
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsdp2.planning.Plan, "make_mesh", lambda plan: one_rank_mesh("cpu", (1,)))
    if "Llama-3-8B" in source:
        Path("Llama-3-8B").mkdir()
        model = Wrapped() if "LlamaForCausalLM" in source else Model()
        save_file(model.state_dict(), "Llama-3-8B/model.safetensors")
    if "dist.destroy_process_group" in source:
        monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    public = {name: getattr(fsdp2, name) for name in fsdp2.__all__}
    names = public | what_a_page_takes_for_given(source)
    exec(compile(source, where, "exec"), names)


def test_what_is_not_run_is_there() -> None:
    everything = "".join(source for page in PAGES for source in blocks(page, "python"))
    for line, reason in NOT_RUN.items():
        assert line in everything, f"{line}: nothing is left out by it ({reason})"


# ---------------------------------------------------------------------------------------- commands

KNOWN = ("make", "fsdp2", "python", "pip", "torchrun")
WORD = re.compile(rf"(?:\w+=\S+ )*({'|'.join(KNOWN)})\b")


def commands(page: Path) -> Iterator[str]:
    """Those of blocks without a language, and those in backquotes that begin with a known word."""
    variables: dict[str, str] = {}
    for block in blocks(page, "", "sh", "bash", "console"):
        lines = block.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):  # the rest is output
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if assignment := re.fullmatch(r"(\w+)=(\S+)", line):
                variables[f"${assignment[1]}"] = assignment[2]
            for part in re.sub(r"\s+#.*", "", line).split(" && "):
                for name, value in variables.items():
                    part = part.replace(name, value)
                if WORD.match(part):
                    yield part
    for part in re.findall(r"`([^`\n]+)`", pages.without_blocks(page)):
        if WORD.match(part) and " " in part and "..." not in part:
            yield part


COMMANDS = sorted({(page.name, each) for page in COMMANDS_IN for each in commands(page)})
MAKEFILE = (ROOT / "Makefile").read_text()
RECIPES = {
    target: recipe
    for names, recipe in re.findall(
        r"^([a-z0-9 -]+):[^=\n]*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE
    )
    for target in names.split()
}
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE))
OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def options_exist(source: str, words: list[str]) -> None:
    for word in words:
        for option in OPTION.findall(word):
            assert f'"{option}"' in source, f"{option} is not there"


def check_make(words: list[str]) -> None:
    for word in words:
        variable, equals, value = word.partition("=")
        if not equals:
            assert word in TARGETS, f"make {word}: no such target"
            continue
        assert f"$({variable})" in MAKEFILE or f"({variable}," in MAKEFILE, f"no {variable}"
        if variable == "ARGS" and "--" in value:
            recipe = RECIPES[words[0]]
            if "-m pytest" in recipe:  # which knows its own
                options_exist((ROOT / "tests" / "conftest.py").read_text(), shlex.split(value))
                continue
            script = re.search(r"examples/train_[\w$*]+\.py|-m (benchmarks[\w.]*)", recipe)
            assert script, f"{words[0]}: takes ARGS to what is not known here"
            options_exist(source_of(script, words[0]), shlex.split(value))


def source_of(script: re.Match[str], target: str) -> str:
    if script[1] is None:
        files = [ROOT / script[0].replace("$*", target.removeprefix("train-"))]
        files += [ROOT / "examples" / "common" / name for name in ("options.py", "training.py")]
    else:
        files = module_files(script[1])
    return "".join(file.read_text() for file in files)


def module_files(module: str) -> list[Path]:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.exists(), f"python -m {module}: no such module"
    # A command may leave its options to another module of its package.
    modules = re.findall(r"^from \. import (.+)$", file.read_text(), re.MULTILINE)
    others = [file.parent / f"{each}.py" for line in modules for each in line.split(", ")]
    return [file, *(other for other in others if other.exists())]


def check_fsdp2(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The words parse: as arguments of a command that is not run."""
    module = importlib.import_module(PROJECT["scripts"]["fsdp2"].partition(":")[0])
    monkeypatch.setattr(module, "_run", lambda args: 0)
    if words[-2:-1] == [">"]:  # what it prints goes to a file
        words = words[:-2]
    alternatives = [word.split("|") for word in " ".join(words).replace(" | ", "|").split()]
    for variant in range(max(map(len, alternatives), default=0)):
        line = [each[min(variant, len(each) - 1)] for each in alternatives]
        if all(word.islower() and word.isalpha() for word in line):  # named, not called
            with pytest.raises(SystemExit, match="0"):
                module.main([*line, "--help"])
            continue
        if line[-1] in ("--help", "--version"):
            with pytest.raises(SystemExit, match="0"):
                module.main(line)
            continue
        assert module.main(["8" if word == "N" else word for word in line]) == 0


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_exist(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(re.sub(r"[\[\]]", "", command), comments=True)
    while "=" in program:
        program, *words = words
    if words == ["-m"]:
        return
    if program == "make":
        check_make(words)
    elif program == "fsdp2" or words[:2] == ["-m", "fsdp2"]:
        check_fsdp2(words if program == "fsdp2" else words[2:], monkeypatch)
    elif words[0] == "-m" and words[1].startswith("benchmarks"):
        options_exist("".join(f.read_text() for f in module_files(words[1])), words[2:])
    elif program in ("python", "torchrun"):
        for word in words:
            assert not word.endswith(".py") or word == "first.py" or (ROOT / word).exists(), word
    elif program == "pip":
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_commands_are_found() -> None:
    programs = {word for word in KNOWN for _, command in COMMANDS if command.startswith(word)}
    assert programs == set(KNOWN)
    assert len(COMMANDS) > 60
