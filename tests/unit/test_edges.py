"""Between files of the core no class of ours is passed as `Any`: a type checker sees every use.
What has no annotation at all counts as `Any`, which a type checker takes it for.

A class that stands later in the layers is a protocol beside its user, as `TreeRuntime` is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import harness

if harness.RUNS_ON_TORCH:
    import pytest

    pytest.skip("fsdp2 only: about its annotations", allow_module_level=True)

from benchmarks.structure import PACKAGE, core_files

# By file, what may be annotated with `Any`: variables, arguments and functions that return it.
ALLOWED = {
    # What users pass: checked where it comes in, or handed on as it is.
    "policy.py": "placement mesh mesh_info",
    "api/fully_shard.py": "class_adapters",
    "api/module.py": "modules args kwargs fn protocol __new__() _apply() __reduce_ex__()",
    "runtime/unit_config.py": "all_reduce_stream keep_frozen",
    # A setting of a part.
    "comm/mesh_transports.py": "policy",
    # Users' tensor subclasses: their methods and attributes.
    "features/inplace_inputs.py": "node",
    "features/tensor_subclasses/tensor_subclass.py": "a b before",
    "features/tensor_subclasses/extension.py": "local arguments self._metadata",
    # The package spmd_types, which need not be installed.
    "features/spmd_types.py": "spmd given made others axes axis own types "
    "its_type completed() _joined()",
    "runtime/torch_modes.py": "given function made args replacing()",
    # JSON, and values of which only a checksum or the text counts.
    "guards/rank_agreement/store_exchange.py": "store self._store verdict found ranks "
    "_wait_for_verdict()",
    "guards/rank_agreement/comparison.py": "data",
    # What torch has no stubs for: specs, process groups' backends, operations of reductions.
    "sharding/param.py": "_specs attributes",
    "sharding/process_groups.py": "only native_backend() _options()",
    "features/early_free/references.py": "tensor",
    "transports/custom.py": "backend args options _symm_mem()",
    "comm/means.py": "operation",
    # The same: device modules with their streams and events.
    "comm/streams.py": "Event Kept _simulated module compute then_on works device_module() "
    "compute()",
    "runtime/schedule.py": "stream",
    # The same: autograd's engine, nodes and contexts; modules' dictionaries; what hooks are given.
    "features/parameter_hooks.py": "key hook",
    "features/double_backward.py": "ctx _ backward()",
    "features/early_free/freed_params.py": "ctx func types args kwargs "
    "__torch_function__() __torch_dispatch__()",
    "features/transforms.py": "ctx enter inputs output",
    "runtime/unit.py": "input_nodes self.of_parts",
    "runtime/events.py": "Runtime UNHEARD args",
    "features/middle.py": "output post_forward()",
    "runtime/hooks.py": "ctx enter grad node output value states _ "
    "self.methods post_forward() _cast()",
    "guards/optimizer_checks.py": "args kwargs param param_group",
    "runtime/registration.py": "args expected self._fast _Columns rows self._guarded",
    "guards/requested_gradients.py": "inputs outputs run args asked kwargs _grad() _run()",
    "runtime/unit_grads.py": "accumulator view",
}


def uses(annotation: ast.AST | None) -> int:
    """How often ``annotation`` has the name `Any`."""
    nodes = ast.walk(annotation) if annotation is not None else ()
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def annotated(tree: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Everything that has an annotation, and aliases of types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield f"{node.name}()", node.returns
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node.annotation
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value


def untyped(path: Path) -> set[str]:
    """What ``path`` annotates with `Any`; "" for other places (a cast, a base class)."""
    tree = ast.parse(path.read_text())
    found = [(name, uses(annotation)) for name, annotation in annotated(tree)]
    elsewhere = uses(tree) - sum(number for _, number in found)
    return {name for name, number in found if number} | ({""} if elsewhere else set()) | bare(tree)


def bare(tree: ast.AST) -> set[str]:
    """Arguments without an annotation, and functions that do not say what they return."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {f"{f.name}()" for f in functions if f.returns is None and f.name != "__init__"}
    for f in functions:
        given = ast.walk(f.args)
        found |= {a.arg for a in given if isinstance(a, ast.arg) and a.annotation is None}
    return found - {"self", "cls"}


def test_any_stands_for_no_class_of_the_core() -> None:
    found = {str(path.relative_to(PACKAGE)): untyped(path) for path in core_files()}
    allowed = {file: set(names.split()) for file, names in ALLOWED.items()}
    assert {file: names for file, names in found.items() if names} == allowed


def test_any_is_found_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "Alias = dict[str, Any]\n"
        "def f(x: int, *args: Any, y: list[Any] | None = None) -> Any:\n"
        "    self.z: Any = 1\n"
    )
    assert untyped(file) == {"Alias", "args", "y", "f()", "self.z"}
    file.write_text("def f(x: int) -> int:\n    return cast(Any, x).y\n")
    assert untyped(file) == {""}
    file.write_text("class A:\n    def __init__(self, x): ...\n    def f(self): ...\n")
    assert untyped(file) == {"x", "f()"}
