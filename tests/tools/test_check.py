"""`make check`: which tests a change selects, in a small tree and in this one."""

from __future__ import annotations

from pathlib import Path

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this repository", allow_module_level=True)

from tools import check
from tools.check import Choice, Graph, fitting, rank

TREE = {
    "fsdp2/__init__.py": "from .runtime.hooks import shard\nfrom . import wrap\n",
    "fsdp2/wrap.py": "def units(): ...\n",
    "fsdp2/runtime/__init__.py": "",
    "fsdp2/runtime/states.py": "class State: ...\n",
    "fsdp2/runtime/hooks.py": "from .states import State\nfrom .. import wrap\ndef shard(): ...\n",
    "fsdp2/plans/__init__.py": "from .search import search\nfrom .costs import cost\n",
    "fsdp2/plans/costs.py": "def cost(): ...\n",
    "fsdp2/plans/search.py": "from .costs import cost\ndef search(): ...\n",
    "docs/guide.md": "A guide.\n",
    "tests/support/harness.py": "import fsdp2\nfsdp2.shard()\n",
    "tests/support/models.py": "from fsdp2 import shard\n",
    "tests/core/test_states.py": "import harness\nimport fsdp2\nfsdp2.shard()\n",
    "tests/core/test_models.py": "from models import make\n",
    "tests/core/test_wrap.py": "import fsdp2 as sharding\nsharding.wrap.units()\n",
    "tests/tools/test_found.py": "import harness\nfrom fsdp2.plans import search\n",
    "tests/tools/test_paid.py": "def test(patch): patch.setattr('fsdp2.plans.cost', None)\n",
    "tests/tools/test_pages.py": "PAGES = ROOT / 'docs'\n",
    "tests/tools/test_structure.py": "import harness\n",
    "tests/unit/test_layers.py": "import ast\n",
}
ALWAYS = {"test_layers": 0, "test_structure": 0}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def selected(root: Path, *changed: str) -> dict[str, int]:
    """Stems of the tests that a change reaches, and how near they are, in their order."""
    choices = rank(Graph(root, changed), list(changed), {})
    return {Path(choice.name).stem: choice.nearness for choice in choices}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("fsdp2/runtime/hooks.py", {"test_states": 1, "test_models": 2}),
        # Two imports away, and named after it.
        ("fsdp2/runtime/states.py", {"test_states": 1, "test_models": 3}),
        # Not through the package's face, which imports everything.
        ("fsdp2/plans/search.py", {"test_found": 1}),
        ("fsdp2/plans/costs.py", {"test_paid": 1, "test_found": 2}),
        ("fsdp2/wrap.py", {"test_wrap": 1, "test_states": 2, "test_models": 3}),
        ("fsdp2/plans/__init__.py", {}),
        ("tests/support/models.py", {"test_models": 1}),
        ("tests/core/test_models.py", {"test_models": 0}),
        ("docs/guide.md", {"test_pages": 1}),
    ],
)
def test_a_change_selects(tree: Path, changed: str, expected: dict[str, int]) -> None:
    assert selected(tree, changed) == ALWAYS | expected


def test_everything_that_uses_the_harness_hears_of_its_change(tree: Path) -> None:
    found = selected(tree, "tests/support/harness.py")
    assert found == ALWAYS | {"test_states": 1, "test_found": 1}


def test_new_gone_and_unknown_files(tree: Path) -> None:
    assert selected(tree, "fsdp2/new.py", "setup.cfg", "data/new.bin") == ALWAYS
    (tree / "tests/core/test_new.py").write_text("import fsdp2.new\n")
    assert selected(tree, "fsdp2/new.py") == ALWAYS | {"test_new": 1}
    assert selected(tree, "tests/core/test_new.py") == ALWAYS | {"test_new": 0}
    (tree / "fsdp2/runtime/states.py").unlink()
    assert selected(tree, "fsdp2/runtime/states.py")["test_states"] == 1


def test_nothing_runs_for_no_change(tree: Path) -> None:
    assert selected(tree) == {}


def test_what_mentions_more_of_a_file_and_takes_less_time_goes_first(tree: Path) -> None:
    for name in ("a", "b", "c"):
        (tree / f"tests/core/test_{name}.py").write_text("from fsdp2.wrap import units\n")
    (tree / "tests/core/test_c.py").write_text("from fsdp2.wrap import units\nunits()\n")
    durations = {"tests/core/test_a.py": 9.0, "tests/core/test_b.py": 2.0}
    choices = rank(Graph(tree), ["fsdp2/wrap.py"], durations)
    assert [Path(c.name).stem for c in choices if c.reason == "imports fsdp2/wrap.py"] == [
        "test_c",
        "test_b",
        "test_a",
    ]


def test_as_many_run_as_fit_and_changed_ones_whatever_they_take() -> None:
    choices = [
        Choice(nearness, 0, seconds, name, "")
        for nearness, seconds, name in [(0, 90, "a"), (1, 5, "b"), (1, 8, "c"), (2, 4, "d")]
    ]
    runs, left_out = fitting(choices, 100)
    assert ([c.name for c in runs], [c.name for c in left_out]) == (["a", "b", "d"], ["c"])
    assert [c.name for c in fitting(choices, 10)[0]] == ["a"]


def test_in_this_repository() -> None:
    """Files with a test of their own lead to it, and to few others as near."""
    graph = Graph(check.ROOT)
    for changed, expected in {
        "fsdp2/features/gather_budget.py": "tests/core/test_gather_budget.py",
        "fsdp2/optim/norms.py": "tests/optim/test_clip.py",
        "fsdp2/planning/trace/kernels.py": "tests/tools/test_kernels.py",
        "fsdp2/checkpoint/agreement.py": "tests/checkpoint/test_checkpoint_together.py",
        "benchmarks/structure.py": "tests/tools/test_structure.py",
        "examples/train_lm.py": "tests/tools/test_examples.py",
    }.items():
        near = [choice.name for choice in rank(graph, [changed], {}) if choice.nearness <= 1]
        assert expected in near, changed
        assert len(near) < 20, changed
    assert set(check.ALWAYS) <= graph.sources.keys()
