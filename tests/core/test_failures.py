"""When communication fails, the error says what was communicated, with whom, and what to do."""

from __future__ import annotations

import contextlib
import copy
import datetime
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from harness import RUNS_ON_TORCH, cached_mesh, distributed, ours_only, shared_folder
from impatient import impatient_mesh
from models import TRANSFORMER
from reference import assert_same_gradients, assert_sharded, pair, run_both

pytestmark = ours_only("messages of its own")

if not RUNS_ON_TORCH:
    from fsdp2 import broadcast_replicas, clip_grad_norm_, full_state_dict, replicate
    from fsdp2.checkpoint import Checkpointer
    from fsdp2.checkpoint import agreement as checkpoint_agreement
    from fsdp2.common.failures import explained
    from fsdp2.experts import TokenExchange
    from fsdp2.optim import Muon, whole_step
    from fsdp2.runtime.states import State
    from fsdp2.runtime.unit import unit_of


def sharded(mesh: DeviceMesh, apply: Callable[..., Any] = fully_shard) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    apply(model[0], mesh=mesh)
    return apply(model, mesh=mesh)


def failure(action: Callable[[], Any], *parts: str) -> None:
    """Of rank 0, while the other does nothing; then both go on."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            action()
        text = str(caught.value)
        for part in ("Rank 0: ", *parts, "failed, waiting for rank 1: ", "watch_ranks"):
            assert part in text, f"{part!r} is not in: {text}"
        assert text.count("watch_ranks") == 1, text
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert str(caught.value.__cause__) in text
    dist.barrier()


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@distributed(2, restart=True)
def test_forward_and_backward_of_one_rank() -> None:
    model = sharded(impatient_mesh())
    step(model)
    failure(lambda: model(torch.ones(2, 4)), "the all-gather of unit '(root)' in forward")
    model = sharded(impatient_mesh())
    step(model)
    loss = model(torch.ones(2, 4)).sum()
    # (The root, kept after forward, is the first to communicate.)
    failure(loss.backward, "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")
    model = sharded(impatient_mesh(), replicate)
    step(model)
    failure(lambda: step(model), "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")


@distributed(2, restart=True)
def test_a_call_of_one_rank_that_all_have_to_make() -> None:
    model = sharded(impatient_mesh())
    step(model)
    failure(lambda: clip_grad_norm_(model.parameters(), 1.0), "a norm's all-reduce")
    model = sharded(impatient_mesh())
    step(model)
    torchs = torch.nn.utils.clip_grad_norm_
    failure(lambda: torchs(model.parameters(), 1.0), "torch's clip_grad_norm_")
    mesh = impatient_mesh()
    failure(lambda: full_state_dict(sharded(mesh), group=mesh.get_group()), "full_state_dict")
    model = sharded(impatient_mesh(), replicate)
    failure(lambda: broadcast_replicas(model), "broadcast_replicas")
    model = sharded(impatient_mesh())
    muon = Muon([p for p in model.parameters() if p.ndim == 2])
    step(model)
    failure(muon.step, "an optimizer's exchange of whole tensors (Muon")
    model = sharded(impatient_mesh())
    whole = whole_step(torch.optim.SGD(model.parameters(), 0.1))
    step(model)
    failure(whole.step, "whole_step")
    mesh = impatient_mesh()
    ids = torch.tensor([[0], [1]])
    failure(lambda: TokenExchange(ids, 2, mesh), "the exchange of tokens between experts")
    with pytest.MonkeyPatch.context() as patch, shared_folder() as folder:
        patch.setattr(checkpoint_agreement, "TIMEOUT", datetime.timedelta(seconds=0.5))
        checkpoint_agreement.run_nonce()
        if dist.get_rank() == 1:  # (the first of the ranks waits for nothing)
            with pytest.raises(RuntimeError, match=AGREEING):
                Checkpointer(folder)
        dist.barrier()


@pytest.mark.parametrize("reshard", [True, 2])
@distributed(4)
def test_a_unit_whose_gather_was_waited_for_in_vain_is_gathered_anew(reshard: Any) -> None:
    """In forward and in backward. All its other messages are waited for, once."""
    case = TRANSFORMER
    model, plain = pair(case, reshard_after_forward=reshard)
    run_both(case, model, plain, 0)
    model.zero_grad()
    plain.zero_grad()
    unit = unit_of(model.get_submodule("blocks.0"))
    for step, in_backward in ((1, False), (2, True)):
        waited: list[int] = []

        def spoil(unit: Any = unit, waited: list[int] = waited, phase: bool = in_backward) -> None:
            if not waited and unit.runtime.in_backward is phase:
                finishes = [partial(waited.append, i) for i in range(2)]
                unit.gather._finishes[:] = [finishes[0], lose, finishes[1], *unit.gather._finishes]

        with pytest.MonkeyPatch.context() as patch:
            wait = unit.wait_unshard
            patch.setattr(
                unit, "wait_unshard", lambda s, w=wait, f=spoil: (f(), w(s)), raising=True
            )
            batch = case.batch(step, dist.get_rank(), torch.float64)
            with pytest.raises(
                RuntimeError, match=r"all-gather of unit 'blocks.0' in .*gloo: lost"
            ):
                case.loss(model, *batch).backward()
        assert waited == [0, 1]
        assert (unit.state, unit.gather._finishes) == (State.SHARDED, [])
        assert_sharded(model.get_submodule("blocks.0"))
        model.zero_grad()
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


class TwoDtypes(nn.Module):
    """As one unit it has two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double())


@pytest.mark.parametrize("raised", [RuntimeError("no luck"), KeyboardInterrupt()])
@distributed(2)
def test_a_launch_that_raises_leaves_nothing_of_the_gathers_before_it(raised: Any) -> None:
    """Of two buckets, which travel one after the other; the next steps are right."""
    torch.manual_seed(0)
    model = TwoDtypes()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=cached_mesh(2))
    unit: Any = unit_of(model)

    def loss(of: nn.Module) -> torch.Tensor:
        torch.manual_seed(dist.get_rank())
        return of(torch.randn(3, 4)).square().sum()

    loss(model).backward()
    model.zero_grad()
    transport = unit.param_group.transports[0].gather
    real, calls = transport.all_gather, 0

    def second_raises(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise raised
        return real(*arguments)

    unit.reshard(unit.runtime.streams)
    with (
        mock.patch.object(transport, "all_gather", second_raises),
        pytest.raises(type(raised)),
    ):
        loss(model)
    assert calls == 2
    assert unit.gather._finishes == []
    for _ in range(2):
        loss(model).backward()
        loss(plain).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            assert isinstance(mine.grad, DTensor)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / 2)
            mine.grad = theirs.grad = None


@distributed(2)
def test_a_whole_tensor_that_one_rank_asks_for() -> None:
    param: Any = sharded(cached_mesh(2))[0].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "redistribute", lose)
        for tensor, words in (
            (param, "full_tensor() of '0.weight'"),
            (param.data, "full_tensor()"),
        ):
            with pytest.raises(RuntimeError) as caught:
                tensor.full_tensor()
            start = (
                f"Rank {dist.get_rank()}: {words}, a call of all ranks, failed, waiting for rank"
            )
            assert str(caught.value).startswith(start), str(caught.value)
            assert "gloo: lost" in str(caught.value)
            assert "watch_ranks" in str(caught.value)
    assert param.full_tensor().shape == (6, 4)


def lose(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("gloo: lost")


AGREEING = (
    r"Rank 1: hearing from rank 0 what to look for in .* failed, waiting for rank 0: .*timeout.*"
    "(?s:.*)Another rank failed or did something else: see its output"
)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_other_errors_stay_as_they_are_and_types_are_kept() -> None:
    with one_rank():
        plain = RuntimeError("shapes do not match")
        with pytest.raises(RuntimeError) as caught, explained("x", None):
            raise plain
        assert caught.value is plain
        with (
            pytest.raises(dist.DistBackendError, match="Rank 0: x failed: lost") as lost,
            explained("y", None),
            explained("x", None),
        ):
            raise dist.DistBackendError("lost")
        assert "y failed" not in str(lost.value)


FRAMES = """failed to recv, got 0 bytes. Connection was likely closed.
Exception raised from recvBytes at Utils.hpp:690 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80
frame #1: <unknown function> + 0x5ffcb53
"""


def test_frames_of_cpp_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the error, and of its cause, which Python shows above it."""
    with one_rank():
        with pytest.raises(dist.DistNetworkError) as lost, explained("x", None):
            raise dist.DistNetworkError(FRAMES)
        assert lost.value.__cause__ is not None
        for error in (lost.value, lost.value.__cause__):
            assert "Connection was likely closed." in str(error)
            assert "frame #" not in str(error)
        monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
        with pytest.raises(dist.DistNetworkError, match="frame #1"), explained("x", None):
            raise dist.DistNetworkError(FRAMES)
