"""Configuration of the documentation site: ``make docs`` builds it into ``build/docs``.

Warnings are errors and every reference is checked, without the network: names of this package and
links between pages by Sphinx, names of torch and of the standard library by importing them.
``make docs ARGS=linkcheck`` asks the servers of external links.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from sphinx.pycode import ModuleAnalyzer

import fsdp2

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Homepage"]

project = "fsdp2"
copyright = "the fsdp2 developers"
version = release = fsdp2.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build"]
nitpicky = True

# Docstrings: ``literal``, `reference`, sections as Google has them.
default_role = "any"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# As written: a default such as MixedPrecisionPolicy() has a long repr, with addresses.
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# Longer ones have an argument per line.
python_maximum_signature_line_length = 88
add_module_names = False

# Headings are the targets of links like profiling.md#the-picture, as on the pages of a repository.
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
# A prompt is no part of a command.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_title = f"fsdp2 {release}"
if "example.invalid" not in REPOSITORY:  # a release has its address: "view this page"
    html_theme_options = {
        "source_repository": REPOSITORY,
        "source_branch": f"v{release}",
        "source_directory": "docs/",
    }
html_copy_source = False
html_show_sphinx = False
linkcheck_timeout = 20

# Packages whose names our docstrings and signatures refer to. A reference is good if it imports.
ELSEWHERE = frozenset({"torch", *sys.stdlib_module_names})
# As our docstrings, and most programs, call them.
ALIASES = {"nn": "torch.nn", "dist": "torch.distributed"}

# Names in signatures that are no part of the API, and have no entry.
NOT_PUBLIC = {
    "T": "the type of the optimizer that a function takes and returns",
    "M": "the type of the module, or list of modules, that a function takes and returns",
    "MeshCut": "what `Layout.cut` makes for `run_whole`",
    "Candidate": "the settings of an `Outcome`; its text says them",
    "StreamLaunch": "an event of a plan; the picture shows it",
    "Span": "the same, with its time",
    "Recording": "the events of a profile; `Measures` has what they add up to",
    "_Memory": "what `Recorder.memory` gives for its own methods",
    "Message": "what `Recorder` hands out for its own later calls",
    "WirePolicy": "the base of `CommPolicy`, by which the kernel knows it",
    "Transport": "how a unit communicates; `fsdp2.custom` has what a user may bring",
}
# Classes that only the library makes: how is not told.
MADE_BY_THE_LIBRARY = {
    "fsdp2.GradientReductionHandle",
    "fsdp2.profiling.Profile",
    "fsdp2.UnshardHandle",
    "fsdp2.checkpoint.SaveHandle",
}


def imports(name: str) -> bool:
    """Whether ``name`` is a module of `ELSEWHERE`, or something in one."""
    first, dot, others = name.partition(".")
    module, *rest = f"{ALIASES.get(first, first)}{dot}{others}".split(".")
    if module not in ELSEWHERE:
        return False
    value: Any = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(module)
            except ImportError:
                return False
        else:
            value = getattr(value, part)
    return True


def resolve_elsewhere(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A name of another package becomes plain text; a wrong one stays, and is reported."""
    name = node.get("reftarget", "")
    return contnode if imports(name) or name.rpartition(".")[2] in NOT_PUBLIC else None


def shown_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returned: Any
) -> Any:
    if name in MADE_BY_THE_LIBRARY:
        return "", None
    # The default of a dataclass's list or dict: no Python, and signatures are parsed.
    return signature and signature.replace("<factory>", "..."), returned


def for_the_site(app: Any, name: str, source: list[str]) -> None:
    """What a page has on the site, and not where its Markdown is read.

    Each message of troubleshooting.md has an address, ``#message-...``. A program before and after
    a migration is shown in tabs.
    """

    def row(found: re.Match[str]) -> str:
        slug = "-".join(re.findall(r"[a-z0-9]+", found[1].lower())[:8])
        return f'| <span id="message-{slug}"></span>{found[0][2:]}'

    if name == "troubleshooting":
        source[0] = re.sub(r"^\| `([^`]+)`", row, source[0], flags=re.MULTILINE)
    if name.startswith("guides/from_"):
        source[0] = re.sub(
            r"^## (Before)\n\n(```python\n.*?^```\n)\n## (After)\n\n(```python\n.*?^```\n)",
            r"::::{tab-set}\n:::{tab-item} \1\n\2:::\n:::{tab-item} \3\n\4:::\n::::\n",
            source[0],
            flags=re.MULTILINE | re.DOTALL,
        )


def without_overloads(analyze: Any) -> Any:
    """`ModuleAnalyzer.analyze`: overloads are for type checkers, pages show one signature."""

    def call(self: Any) -> None:
        analyze(self)
        self.overloads = {}

    return call


def setup(app: Any) -> None:
    ModuleAnalyzer.analyze = without_overloads(ModuleAnalyzer.analyze)
    app.connect("missing-reference", resolve_elsewhere)
    app.connect("source-read", for_the_site)
    app.connect("autodoc-process-signature", shown_signature)
