"""Trains with an optimizer over sharded parameters, and with the same one in one process.

Every case has its own process group with a short timeout: a rank that fails alone leaves its group
broken. Ranks exchange their outcomes through the store.
"""

from __future__ import annotations

import itertools
import json
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp2 import fully_shard
from fsdp2.optim import flat_step, local_step, whole_step

from .optimizer_cases import OptimizerCase

WAYS: dict[str, Callable[[Any], Any]] = {
    "plain DTensors": lambda optimizer: optimizer,
    "local_step": local_step,
    "flat_step": flat_step,
    "whole_step": whole_step,
}
# Gradient scale of each step, so that mistakes in clipping and counters show.
SCALES = (1.0, 0.01, 30.0, 1.0, 100.0, 0.3)
GROUP_TIMEOUT = timedelta(seconds=5)
# Allowed rounding error, relative to the largest change of a parameter.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_runs = itertools.count()  # number of this process's runs; the store keeps the keys of each
OURS = "fsdp2.optim."  # in every warning of ours about an optimizer
PACKAGE = str(Path(__file__).parents[1] / "fsdp2")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one way of stepping: "right", "refused", "raises", "warned", "wrong" or "not
    trained"."""

    kind: str
    text: str = ""


def build(case: OptimizerCase, dtype: torch.dtype) -> nn.Module:
    """A model whose rows neither 2 nor 3 ranks share evenly; some ranks have no rows of the last
    parameters.

    For optimizers that quantize their state, it also has a weight of which all ranks hold whole
    blocks.
    """
    torch.manual_seed(0)
    sizes = [64, 65, 7, 1]
    if case.quantizes:
        sizes[1:1] = [128, 192]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Loss:
    """The closure: gradients of the same batch on every rank, scaled."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.step = model, dtype, 0

    @torch.enable_grad()
    def __call__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.step)
        batch = torch.randn(8, 64, generator=generator, dtype=torch.float64).to(self.dtype)
        self.model.zero_grad()
        loss = (self.model(batch) - 1).square().mean() * SCALES[self.step]
        loss.backward()
        return loss.detach()


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a whole tensor, as `torch.chunk` splits it."""
    if not isinstance(like, DTensor):
        return whole
    chunks = whole.chunk(like.device_mesh.size()) if whole.ndim else (whole,)
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole[:0]


def steps(optimizer: Any, loss: Loss, with_closure: bool, feed: Any = None) -> Any:
    """Yield after each step.

    Args:
        feed: called between backward and step.
    """
    for step in range(len(SCALES)):
        loss.step = step
        if not with_closure:
            loss()
            if feed is not None:
                feed(step)
        torch.manual_seed(step)
        optimizer.step(loss) if with_closure else optimizer.step()
        yield step


@dataclass
class Reference:
    """The training on one process: gradients and parameters of each step."""

    dtype: torch.dtype
    initial: list[Tensor]
    grads: list[list[Tensor]]
    params: list[list[Tensor]]


def reference(case: OptimizerCase, dtype: torch.dtype) -> Reference:
    model = build(case, dtype)
    result = Reference(dtype, [p.detach().clone() for p in model.parameters()], [], [])
    optimizer = case.make(model, lambda optimizer: optimizer)

    def note(step: int) -> None:
        result.grads.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]

    for _ in steps(optimizer, Loss(model, dtype), case.with_closure, note):
        result.params.append([p.detach().clone() for p in model.parameters()])
    if not all(p.isfinite().all() for p in result.params[-1]):
        raise ArithmeticError("parameters became infinite")
    return result


class InDouble(TorchFunctionMode):
    """What is computed in bfloat16, computed in float64.

    Newton-Schulz iterations in bfloat16 enlarge the rounding of their first products: two orders of
    summation differ by as much as two optimizers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.bfloat16 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.bfloat16 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exactly(dtype: torch.dtype) -> Any:
    return InDouble() if dtype == torch.float64 else nullcontext()


def error_of(case: OptimizerCase, way: str, expected: Reference, mesh: DeviceMesh) -> float:
    """The largest error of this rank's parameters, in terms of the largest change of each."""
    model = build(case, expected.dtype)
    for layer in model[::2]:  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = case.make(model, WAYS[way])

    def feed(step: int) -> None:
        for p, grad in zip(model.parameters(), expected.grads[step], strict=True):
            p.grad._local_tensor.copy_(own_rows(grad, p))  # type: ignore[union-attr]

    worst = 0.0
    for step in steps(optimizer, Loss(model, expected.dtype), case.with_closure, feed):
        for p, before, value in zip(
            model.parameters(), expected.initial, expected.params[step], strict=True
        ):
            change = (value - before).abs().max().item()
            actual = p.detach()._local_tensor
            wanted = own_rows(value, p)
            if not wanted.numel():
                continue
            difference = (actual - wanted).abs().max().item()
            if difference != difference:
                return float("inf")
            floor = torch.finfo(expected.dtype).eps * value.abs().max().item()
            worst = max(worst, difference / max(change, 10 * floor))
    return worst


def try_way(case: OptimizerCase, way: str, expected: Reference, key: str) -> Outcome:
    """One case on all ranks of the world."""
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=GROUP_TIMEOUT, backend="gloo")
    answer: dict[str, Any]
    try:
        # DTensor caches by mesh equality, including the group of an earlier, equal mesh, which may
        # be broken: a name of its own makes this mesh different.
        name = re.sub(r"\W", "_", key)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
        with warnings.catch_warnings(record=True) as caught, exactly(expected.dtype):
            warnings.simplefilter("always")
            answer = {"error": error_of(case, way, expected, mesh)}
        answer["warned"] = [str(w.message) for w in caught if OURS in str(w.message)]
    except Exception as error:
        answer = {"raised": _described(error), "at": _where(error)}
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{dist.get_rank()}", json.dumps(answer))
    answers = [json.loads(store.get(f"{key}/{rank}")) for rank in ranks]
    return judge(answers, TOLERANCE[expected.dtype])


def judge(answers: Sequence[dict[str, Any]], tolerance: float) -> Outcome:
    """Combine the ranks' answers: a rank's own failure counts, not the timeout of others."""
    raised = [a for a in answers if "raised" in a]
    if not raised:
        worst = max(a["error"] for a in answers)
        if worst <= tolerance:
            return Outcome("right")
        warned = [text for a in answers for text in a.get("warned", ())]
        return Outcome("warned", warned[0]) if warned else Outcome("wrong", f"by {worst:.0e}")
    # The other ranks see a timeout, or whole_step's message.
    first = min(raised, key=lambda a: (a["at"] == "waiting", a["at"] == "fsdp2"))
    if first["at"] == "fsdp2":
        return Outcome("refused", first["raised"])
    return Outcome("raises", f"{first['raised']} (in {first['at']})")


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _where(error: Exception) -> str:
    """The package of the innermost frame."""
    text = str(error)
    if any(word in text for word in ("Timed out", "timeout", "Connection closed", "gloo")):
        return "waiting"
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if frames[-1].startswith(PACKAGE):
        return "fsdp2"
    packages = [f.split("site-packages/")[1].split("/")[0] for f in frames if "site-packages/" in f]
    return packages[-1] if packages else "Python"


def outcomes(case: OptimizerCase, key: str) -> dict[str, Outcome]:
    """The outcome of every way of stepping, on the ranks of the world."""
    if case.left_out:
        return dict.fromkeys(WAYS, Outcome("not trained", case.left_out))
    expected = None
    for dtype in case.dtypes:
        try:
            with exactly(dtype):
                expected = reference(case, dtype)
            break
        except Exception as error:
            reason = f"error on a single process: {_described(error)}"
    if expected is None:
        return dict.fromkeys(WAYS, Outcome("not trained", reason))
    return {way: try_way(case, way, expected, f"{key}/{way}") for way in WAYS}


def train_all(found: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The outcomes of optimizers, by library and name, as JSON; for `ranks.run_ranks`."""
    from .ranks import progress

    answer: dict[str, Any] = {}
    run = next(_runs)
    with torch.compiler.set_stance("force_eager"):
        for library, name in found:
            key = f"{library}/{name}"
            by_way = outcomes(OptimizerCase(library, name), f"optimizers/{run}/{key}")
            answer[key] = {way: [o.kind, o.text] for way, o in by_way.items()}
            progress(f"{key}: {[' '.join(v)[:60] for v in answer[key].values()]}")
    return answer
