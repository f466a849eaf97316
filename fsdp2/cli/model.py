"""Arguments of commands on models: which model, and how to shard it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.suggestions import did_you_mean
from .ckpt import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from ..policy import MixedPrecisionPolicy
    from ..transports.compressed.policy import CommPolicy

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
WIRE_DTYPES = {"bf16": "bfloat16", "int8": "int8", "float8": "float8_e4m3fn"}
STRATEGIES = ("full", "grad", "optimizer", "none", "hybrid")


class ModelError(Exception):
    """The model that a command should use cannot be created."""


def add_model_name(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `load_model` reads."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="function or class that creates the model when called without arguments: "
        "package.module:function or path/to/file.py:function; called on the meta device",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_model` and `sharding_options` read."""
    add_model_name(parser)
    parser.add_argument(
        "--world-size", type=parse_number, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--node-size",
        type=parse_number,
        metavar="G",
        help="ranks per node, for --strategy hybrid",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="full",
        help="what to shard over the ranks (default: full)",
    )
    parser.add_argument(
        "--wrap",
        default="auto",
        metavar="POLICY",
        help="which modules become units: auto (the default), root, class:Block,Embedding, "
        "size:32MiB, or names: embedding,layers.*,norm+head",
    )
    parser.add_argument("--param-dtype", choices=DTYPES, help="dtype of computation and gathers")
    parser.add_argument("--reduce-dtype", choices=DTYPES, help="dtype of gradient reduction")
    add_wire(parser)
    parser.add_argument(
        "--replicate-below",
        type=parse_bytes,
        default=0,
        metavar="SIZE",
        help="replicate smaller parameters on every rank: 64KiB, ...",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device type (default: cuda); cpu uses gloo",
    )


def add_wire(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `comm_policy_of` reads."""
    about = "dtype in which {} are sent, instead of a wider one"
    parser.add_argument("--gather-as", choices=WIRE_DTYPES, help=about.format("weights"))
    parser.add_argument("--reduce-as", choices=("bf16", "int8"), help=about.format("gradients"))


def parse_number(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def load_model(target: str) -> nn.Module:
    """Create the model that ``target`` names, on the meta device.

    Raises:
        ModelError: if ``target`` does not exist, fails, or does not return a model.
    """
    import torch
    from torch import nn

    build = find_object(target)
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise ModelError(f"{target} is a {type(build).__name__}, not a function")
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise ModelError(f"{target} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{target} returned a {type(model).__name__}, not a model")
    return model


def find_object(target: str) -> Any:
    """The object that ``target`` names: ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        ModelError: if it does not exist.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ModelError(
            f"{target!r} does not name a function: write module:function or file.py:function"
        )
    found: Any = _import(where)
    for part in name.split("."):
        inside, found = found, getattr(found, part, None)
        if found is None:
            raise ModelError(f"{where} has no '{name}'{did_you_mean(part, dir(inside))}")
    return found


def _import(where: str) -> Any:
    try:
        if not where.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")  # as `python -m` does
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.is_file():
            raise ModelError(f"{where}: No such file")
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses look up their module there
        spec.loader.exec_module(module)
        return module
    except ModelError:
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == where.partition(".")[0]:
            files = [path.stem for path in Path().glob("*.py")]
            hint = did_you_mean(where, files) or (
                ": modules are searched in this folder and among installed packages; for a file "
                "elsewhere, use path/to/file.py:function"
            )
        raise ModelError(f"cannot import {where}: {type(error).__name__}: {error}{hint}") from error


def sharding_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `explain`, from the command line.

    Raises:
        ModelError: if they contradict each other.
    """
    shape: Any = args.world_size
    if args.node_size is not None:
        if args.world_size % args.node_size:
            raise ModelError(
                f"--world-size {args.world_size} is not a multiple of --node-size {args.node_size}"
            )
        shape = (args.world_size // args.node_size, args.node_size)
    if args.strategy == "hybrid" and args.node_size is None:
        raise ModelError("--strategy hybrid needs --node-size")
    return {
        "mesh_shape": shape,
        "strategy": args.strategy,
        "wrap": parse_wrap(args.wrap),
        "mp_policy": precision_of(args),
        "comm_policy": comm_policy_of(args),
        "replicate_below": args.replicate_below,
        "device_type": args.device,
    }


def precision_of(args: argparse.Namespace) -> MixedPrecisionPolicy:
    """The policy for ``--param-dtype`` and ``--reduce-dtype``."""
    import torch

    from ..policy import MixedPrecisionPolicy

    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, DTYPES[name])

    return MixedPrecisionPolicy(dtype(args.param_dtype), dtype(args.reduce_dtype))


def comm_policy_of(args: argparse.Namespace) -> CommPolicy | None:
    """The policy for ``--gather-as`` and ``--reduce-as``; None without both."""
    import torch

    from ..transports.compressed.policy import CommPolicy

    if args.gather_as is None and args.reduce_as is None:
        return None
    chosen = (args.gather_as, args.reduce_as)
    return CommPolicy(*(name and getattr(torch, WIRE_DTYPES[name]) for name in chosen))


def parse_wrap(text: str) -> Any:
    """The ``wrap`` argument for the text of ``--wrap``.

    Raises:
        ModelError: if the text is invalid.
    """
    from ..wrap import as_policy

    kind, _, rest = text.partition(":")
    if text in ("auto", "root"):
        return text
    if kind == "class" and rest:  # one policy each: a pipeline stage may have only some of them
        return [f"class:{name.strip()}" for name in rest.split(",")]
    if kind == "size" and rest:
        try:
            return as_policy(text)
        except ValueError as error:
            raise ModelError(f"--wrap: {error}") from error
    names = text.split(",")
    if rest or not all(all(name.split("+")) for name in names):
        hint = did_you_mean(kind, ("class", "size")) if rest else ""
        raise ModelError(
            f"--wrap must be auto, root, class:..., size:... or names, got {text!r}{hint}"
        )
    return [tuple(n.split("+")) if "+" in n else n for n in names]
