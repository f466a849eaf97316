"""Builds a release into ``dist/``: ``python tools/release.py --url https://HOST/OWNER/fsdp2``.

The version is that of the tree without ``.dev``. What git has at HEAD is copied; in the copy, the
version is set, `PLACEHOLDER` becomes the address of the repository, links of the README become
absolute (an index of packages shows it without the repository), and the changelog's "Unreleased"
gets version and date. Wheel and sdist are made from it, checked by twine, and installed and tried
on each Python there is (`dist_check`). ``dist/notes.md`` has the notes. Nothing is uploaded or
tagged: the commands for that are printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from datetime import date
from pathlib import Path

from dist_check import ROOT, build_of, check, interpreters, run

PLACEHOLDER = "https://example.invalid/fsdp2"
VERSION_FILE = Path("fsdp2", "common", "versions.py")
VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release into dist/.")
    parser.add_argument("--url", required=True, help="address of the repository")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if run(["git", "status", "--porcelain"], ROOT).strip():
        parser.error("there are changes that are not committed")
    with tempfile.TemporaryDirectory(prefix="fsdp2-release.") as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        archive = Path(folder, "tree.tar")
        run(["git", "archive", "--output", str(archive), "HEAD"], ROOT)
        run(["tar", "-xf", str(archive)], tree)
        version = prepare(tree, options.url, date.today().isoformat())
        wheel, sdist = build_of(tree, options.output)
        (options.output / "notes.md").write_text(notes(tree, version))
        run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], ROOT)
        tried = [
            check(python, artifact, Path(folder))
            for python in interpreters(options.python)
            for artifact in (wheel, sdist)
        ]
    if not all(tried):
        return 1
    print(f"{options.output} has fsdp2 {version} and its notes. Next:")
    print(f"  git tag -a v{version} -F {options.output}/notes.md && git push origin v{version}")
    print(f"  python -m twine upload {wheel} {sdist}")
    return 0


def prepare(tree: Path, url: str, today: str) -> str:
    """Turns a copy of the repository into what is released; returns the version.

    Raises:
        ValueError: if the changelog has nothing under "Unreleased".
    """
    source = (tree / VERSION_FILE).read_text()
    found = VERSION_LINE.search(source)
    assert found is not None, f"{VERSION_FILE} has no __version__"
    version = found[1].partition(".dev")[0]
    (tree / VERSION_FILE).write_text(VERSION_LINE.sub(f'__version__ = "{version}"', source))

    changelog = tree / "CHANGELOG.md"
    text = changelog.read_text()
    if not re.search(r"^## Unreleased\n+(?!## )\S", text, re.MULTILINE):
        raise ValueError("CHANGELOG.md has nothing under '## Unreleased'")
    released = text.replace("## Unreleased\n", f"## {version} - {today}\n", 1)
    changelog.write_text(absolute(released, f"{url}/blob/v{version}"))

    for name in ("pyproject.toml", "README.md", "docs/index.md"):
        text = (tree / name).read_text().replace("alpha, not released.", "alpha.")
        (tree / name).write_text(text.replace(PLACEHOLDER, url))
    readme = tree / "README.md"
    readme.write_text(absolute(readme.read_text(), f"{url}/blob/v{version}"))
    return version


def absolute(text: str, base: str) -> str:
    """Links to files of the repository, made absolute."""
    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({base}/\1)", text)


def notes(tree: Path, version: str) -> str:
    """What the changelog has about ``version``."""
    text = (tree / "CHANGELOG.md").read_text()
    section = re.search(rf"^## {re.escape(version)} .*\n+((?:(?!## ).*\n)+)", text, re.MULTILINE)
    assert section is not None
    return f"fsdp2 {version}\n\n{section[1].strip()}\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
