"""`make release`: what is changed in a copy of the repository before it is built."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import ours_only

pytestmark = ours_only("about the release of this package")

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
URL = "https://host/owner/fsdp2"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release

    yield release
    for name in ("release", "dist_check"):
        sys.modules.pop(name, None)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "fsdp2/common/versions.py",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "docs/index.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_version_addresses_and_links_are_filled_in(release, tree: Path) -> None:
    version = release.prepare(tree, URL, "2027-01-31")
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f'__version__ = "{version}"' in (tree / "fsdp2/common/versions.py").read_text()
    for name in ("pyproject.toml", "README.md", "docs/index.md"):
        text = (tree / name).read_text()
        assert release.PLACEHOLDER in (ROOT / name).read_text()
        assert "example.invalid" not in text
        assert "not released" not in text
        assert URL in text
    links = re.findall(r"\]\(([^)]+)\)", (tree / "README.md").read_text())
    assert len(links) > 20
    base = f"{URL}/blob/v{version}/"
    for link in links:
        assert link.startswith(base), link
        assert (ROOT / link.removeprefix(base).partition("#")[0]).exists(), link


def test_notes_are_the_newest_section_of_the_changelog(release, tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n"
        "- new ([how](docs/guide.md#a))\n\n### Fixed\n\n- a fault\n\n"
        "## 0.0.9 - 2026-01-01\n\n- old\n"
    )
    version = release.prepare(tree, URL, "2027-01-31")
    assert f"\n## {version} - 2027-01-31\n" in (tree / "CHANGELOG.md").read_text()
    assert release.notes(tree, version) == (
        f"fsdp2 {version}\n\n- new ([how]({URL}/blob/v{version}/docs/guide.md#a))\n\n"
        "### Fixed\n\n- a fault\n"
    )


def test_a_release_without_changes_is_refused(release, tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.0.9 - 2026-01-01\n")
    with pytest.raises(ValueError, match="nothing under '## Unreleased'"):
        release.prepare(tree, URL, "2027-01-31")
