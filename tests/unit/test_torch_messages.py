"""Each error that torch's `fully_shard` raises has a counterpart here, or a reason to have none."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about the source of this package", allow_module_level=True)

import fsdp2

# The tests that make the mistakes, or that do what torch refuses.
TESTS = tomllib.loads((Path(__file__).parents[1] / "core" / "compatibility.toml").read_text())[
    "messages"
]

# Words that scripts and torch's own tests match, and that our message for the same mistake has.
SAME = (
    "At least one of shard or replicate must be set in DataParallelMeshDims",
    "param_dtype_override_fn must return a torch.dtype or None but got",
    "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype",
    "Invalid shard_placement_fn result",
    "does not support containers that do not implement forward",
    "fully_shard expects a 1D or 2D DeviceMesh but got",
    "reshard_after_forward should be a bool or an int representing the group size to reshard to",
    "mesh must have mesh_dim_names when dp_mesh_dims is provided",
    "If passing reshard_after_forward as an int, it should be a factor of",
    "not found in mesh.mesh_dim_names",
    "Requires DTensor to have mesh of the same type as the FSDP mesh but got",
    " is invalid for ",
    "has incomplete spmd_types annotations for FSDP storage",
    "has spmd_types annotation on axis",
    "FSDP requires DP parameters to be R since it handles the DP gradient reduction",
    "spmd_types parameters require fully_shard() to be called with both",
    "to be the same mesh passed to fully_shard, but got different mesh objects",
    "FSDP requires the DP and model parallel TP/EP mesh",
    "Expected Replicate() on DP",
    "should be defined",  # both methods of an extension
    "FSDP parameters should be materialized from meta device before training",
    "Reducing unused parameters with grad_dtype=None requires an explicit",
    "The previous gradient reduction must be waited on before forward",
    "The previous gradient reduction must be waited on before finalizing backward again",
    "finalize_backward requires manual backward finalization",
    "finalize_backward must be called after backward completes",
    "must be called on the root",
    "set_manual_backward_finalization cannot change mode during backward",
    "set_manual_backward_finalization cannot change mode after backward starts",
    "This gradient reduction handle was invalidated",
    "is shared with a parameter already managed by another FSDP group",
    "does not have a method",
    "reshard_after_forward should be a bool, got",
    "is not supported with multiple param groups",
    "stream cannot be set when using native HSDP",
    "max_input_buffers must be an int, got",
    "max_input_buffers must be a positive int, got",
    "Expects FSDPModule but got",
)
# What torch refuses and what works here.
WORKS = (
    "doesn't support scalar parameters",
    "does not support non-contiguous parameters",
    "does not support uneven sharding",
    "requires even sharding",
    "expects uniform original parameter dtype",
    "expects uniform reduce dtype",
    "Resharding to smaller mesh is not supported for DTensor parameters",
    "not yet supported with SPMD mesh",
    "must be DTensors on the full SPMD mesh",
    "must use the same FSDPMeshInfo object",
    "has already been lazily initialized",
    "must return all-gather inputs with the padded sharded size",
    "does not support deepcopy",
    "only supports 1D TP/EP or 2D EP+TP",
    "requires a single root module",
    "finalize_backward must be called after the first forward",
    "does not support partial gradient reductions",
    "manual backward finalization requires all-reduce",
    "owned by another FSDP root",
    "Another gradient reduction sharing this communication context",
    "cannot overlap work from another FSDP root",
    "set_reduce_scatter_max_input_buffers(>1) is not supported with the symmetric-memory",
    "Per-param mesh via shard_placement_fn is not supported with",
)
# The same mistake is an error here, in other words.
OTHER = (
    "At least one of shard or replicate must be set in dp_mesh_dims",
    "Expects list of FSDPModules",
    "runtime annotations on compute mesh axes",
    "annotations on a typechecking mesh that does not span the same ranks",
    "partial spmd_types annotations that cannot be restored",
)
# Nothing here raises for this.
NO_COUNTERPART = (
    "Releasing all-gather outputs after post-all-gather is not supported",
    "FSDP parameters should be materialized on CPU when enabling CPU offloading",
)


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return "{}"


def raised_by_torch() -> Iterator[tuple[str, str, str]]:
    """File and line, type, and text of each error, braces in place of what is computed."""
    folder = Path(fsdp.__file__).parent / "_fully_shard"
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = "".join(map(text_of, node.exc.args))
                yield f"{path.name}:{node.lineno}", ast.unparse(node.exc.func), text


def ours() -> str:
    """All strings of the package, braces in place of what is computed."""
    found = []
    for path in sorted(Path(fsdp2.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                found.append(text_of(node))
    return "\0".join(found)


NEWEST = pytest.mark.skipif(torch.__version__ < "2.15", reason="the errors of torch 2.15")


@NEWEST
def test_every_error_of_torch_is_accounted_for() -> None:
    known = (*SAME, *WORKS, *OTHER, *NO_COUNTERPART)
    new = [
        f"{place} {kind}: {text}"
        for place, kind, text in raised_by_torch()
        # Assertions are torch's own invariants, but for those that are in the lists.
        if kind != "AssertionError"
        and "Unknown pass type" not in text
        and not any(words in text for words in known)
    ]
    assert not new, "\n".join(new)


@NEWEST
def test_the_words_are_torchs() -> None:
    theirs = "\0".join(text for _, _, text in raised_by_torch())
    known = (*SAME, *WORKS, *OTHER, *NO_COUNTERPART)
    assert [words for words in known if words not in theirs] == []


def test_our_messages_have_the_words_of_torch() -> None:
    text = ours()
    assert [words for words in (*SAME, *TESTS["same"]) if words not in text] == []


def test_what_torch_refuses_otherwise_has_tests() -> None:
    """`test_compatibility.py` looks whether they exist."""
    assert set(TESTS["works"]) == set(WORKS)
    assert set(TESTS["other"]) == set(OTHER)
    assert all(named for kind in TESTS.values() for named in kind.values())
