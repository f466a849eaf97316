"""The first script and the tutorial: they run, and every step has the losses of the plain loop."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

from example_runs import EXAMPLES, run_forked, run_scripts
from fsdp2.checkpoint import Checkpointer
from fsdp2.cli.main import main
from pages import ROOT, blocks, commands, is_quoted, linked_files

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
STEPS = 4


def losses(printed: Path) -> list[float]:
    return [
        float(value) for value in re.findall(r"^step \d+: loss (\S+)$", printed.read_text(), re.M)
    ]


def test_the_minimal_script_learns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (EXAMPLES / "minimal.py").read_text()
    assert source.count("\n") <= 60
    imports = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {
        name for node in imports for name in (getattr(node, "module", None) or node.names[0].name,)
    }
    assert {name.split(".")[0] for name in names} == {"torch", "fsdp2"}
    monkeypatch.chdir(tmp_path)
    runs = [("minimal.py", [], tmp_path / f"printed{i}") for i in range(2)]
    run_scripts(2, runs)
    first, second = (losses(printed) for *_, printed in runs)
    assert len(first) == len(second) == 4
    assert second[-1] < first[-1] < 0.7 * first[0]
    assert Checkpointer(tmp_path / "minimal-checkpoints").steps() == [20, 40]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the plain loop."""
    printed = tmp_path_factory.mktemp("plain") / "printed"
    run_forked(1, "tutorial/step1.py", [str(STEPS)], printed)
    values = losses(printed)
    assert len(values) == STEPS
    assert values[-1] < 0.6 * values[0]
    return values


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Those of steps 2 to 5, on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where step 5 leaves its checkpoints
        numbers = (2, 3, 4, 5)
        run_scripts(
            2, [(f"tutorial/step{n}.py", [str(STEPS)], folder / f"printed{n}") for n in numbers]
        )
    return {n: losses(folder / f"printed{n}") for n in numbers}


@pytest.mark.parametrize("number", [2, 3])
def test_sharded_steps_are_the_plain_loop(
    number: int, plain: list[float], sharded: dict[int, list[float]]
) -> None:
    assert sharded[number] == pytest.approx(plain, rel=1e-4)


def test_mixed_precision_and_accumulation_stay_near_the_plain_loop(
    plain: list[float], sharded: dict[int, list[float]]
) -> None:
    assert sharded[4] == pytest.approx(plain, rel=2e-2)
    assert sharded[4] != pytest.approx(plain, rel=1e-4), "was bfloat16 used?"


def test_a_checkpoint_resumes_on_another_number_of_ranks(
    sharded: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_forked(2, "tutorial/step5.py", [str(STEPS // 2)], tmp_path / "first")
    run_forked(3, "tutorial/step5.py", [str(STEPS)], tmp_path / "second")
    assert losses(tmp_path / "first") == sharded[5][: STEPS // 2]
    assert f"resumed after step {STEPS // 2}" in (tmp_path / "second").read_text()
    assert losses(tmp_path / "second") == pytest.approx(sharded[5][STEPS // 2 :], rel=1e-2)


def test_replicas_of_a_sharded_model(plain: list[float], tmp_path: Path) -> None:
    run_forked(4, "tutorial/step6.py", [str(STEPS)], tmp_path / "printed")
    printed = (tmp_path / "printed").read_text()
    assert losses(tmp_path / "printed") == pytest.approx(plain, rel=2e-2)
    assert "2 replicas x 2 shards" in printed
    assert "of which compute waited for communication" in printed


# ------------------------------------------------------------------------------------- the pages


def test_the_page_of_every_step_is_there() -> None:
    assert [page.stem for page in PAGES] == [f"step{n}" for n in range(1, 7)]
    for page in PAGES:
        assert EXAMPLES / "tutorial" / f"{page.stem}.py" in {
            p.resolve() for p in linked_files(page)
        }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_a_page_is_that_of_its_scripts(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            assert is_quoted(block, page), (
                f"{page.name}: in no file that it links to:\n{block.code}"
            )
        else:
            assert block.language in ("sh", "text"), f"{page.name}: a block of {block.language!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_a_page_run_its_script(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun and python: the script that other tests here run. The command `fsdp2` itself."""
    script = f"examples/tutorial/{page.stem}.py"
    torchrun = rf"torchrun --standalone --nproc-per-node \d {script}( \d+)?"
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        if command.startswith("fsdp2 "):
            assert main(command.split()[1:]) == 0, capsys.readouterr().err
        else:
            assert re.fullmatch(rf"({torchrun}|python {script})", command), command
