"""Configuration of the documentation site: ``make docs`` builds it into ``build/docs``.

Warnings are errors and every reference is checked, without the network: names of this package and
links between pages by Sphinx, names of torch and of the standard library by importing them.
``make docs ARGS=linkcheck`` asks the servers of external links.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import fsdp2

project = "fsdp2"
copyright = "the authors of fsdp2"
version = release = fsdp2.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
add_module_names = False

# Headings are the targets of links like planning.md#the-picture, as on the pages of a repository.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"fsdp2 {release}"
html_copy_source = False
html_show_sphinx = False
linkcheck_timeout = 20

# Packages whose names our docstrings and signatures refer to. A reference is good if it imports.
ELSEWHERE = frozenset({"torch", *sys.stdlib_module_names})


def imports(name: str) -> bool:
    """Whether ``name`` is a module of `ELSEWHERE`, or something in one."""
    module, *rest = name.split(".")
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
    return contnode if imports(node.get("reftarget", "")) else None


def setup(app: Any) -> None:
    # A chapter whose pages are not written yet: its glob matches nothing. The warning has no type
    # that suppress_warnings could name.
    toctrees = logging.getLogger("sphinx.sphinx.directives.other")
    toctrees.addFilter(lambda record: "glob pattern" not in str(record.msg))
    app.connect("missing-reference", resolve_elsewhere)
