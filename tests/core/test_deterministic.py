"""`deterministic`: the same bits in every run, on any hosts, and where they are those of DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.transport import pretended_hosts
from harness import RUNS_ON_TORCH, cached_mesh, cpu_only, distributed, ours_only

pytestmark = [ours_only("deterministic"), cpu_only("gloo")]

if not RUNS_ON_TORCH:
    import fsdp2
    import fsdp2.transports.host.exchange
    import fsdp2.transports.host.links
    from fsdp2 import CommPolicy, MixedPrecisionPolicy, shard_model
    from fsdp2.api.deterministic import _by_switches
    from fsdp2.transports.host.meeting import ORDER, SWITCH

Make = Callable[[nn.Module], nn.Module]
HOSTS = [0, 0, 1, 1]
WAYS = ("reads", "messages", "collectives", "hosts", "hosts in rank order")


@contextmanager
def going(way: str) -> Iterator[None]:
    """What shards and gradients travel by in groups that are used first inside."""
    exchange: Any = fsdp2.transports.host.exchange
    host_links: Any = fsdp2.transports.host.links
    environment = {"messages": {SWITCH: "0"}, "hosts in rank order": {ORDER: "rank"}}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment.get(way, {})))
        if way.startswith("hosts"):
            stack.enter_context(pretended_hosts(HOSTS))
        if way == "collectives":
            stack.enter_context(mock.patch.object(exchange, "EXCHANGE_MAX_RANKS", 1))
        host_links._found.clear()
        yield
        host_links._found.clear()


@contextmanager
def restored() -> Iterator[None]:
    """Undo what `deterministic` sets."""
    cudnn = torch.backends.cudnn.benchmark
    with mock.patch.dict(os.environ):
        yield
    torch.backends.cudnn.benchmark = cudnn
    torch.use_deterministic_algorithms(False)


def build() -> nn.Module:
    """With sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(97, 203), nn.GELU(), nn.LayerNorm(203), nn.Linear(203, 311), nn.Linear(311, 31)
    )


def trained(make: Make, *, clip: bool = False, micro_batches: int = 1) -> list[Tensor]:
    """The whole parameters after three steps of AdamW."""
    model: Any = make(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            numbers = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            if isinstance(model, DistributedDataParallel):
                syncing = nullcontext() if last else model.no_sync()
            else:
                syncing = nullcontext()
                model.set_requires_gradient_sync(last)
            with syncing:
                model(torch.randn(8, 97, generator=numbers)).square().mean().backward()
        if clip:
            fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    params: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in params]


def sharded(*shape: int, **options: Any) -> Make:
    mesh = cached_mesh(*shape, names=("replicate", "shard") if len(shape) == 2 else None)
    return lambda model: shard_model(model, mesh, wrap=nn.Linear, **options)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- the same bits in every run -------------------------------------------------------------------


SETTINGS = ("full", "direct", "hybrid", "none", "bf16", "int8", "sharded sums", "clip")


def setting(name: str) -> tuple[Make, dict[str, Any]]:
    """How the model is sharded over four ranks, and options of `trained`."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    int8 = CommPolicy(
        gather=torch.int8, reduce=torch.int8, block=16, ranks_per_node=2, error_feedback=True
    )
    if name == "hybrid":
        return sharded(2, 2), {}
    options: dict[str, dict[str, Any]] = {
        "direct": {"direct_min_bytes": 0},
        "none": {"strategy": "none"},
        "bf16": {"mp_policy": bf16},
        "int8": {"comm_policy": int8, "direct_min_bytes": 0},
    }
    make = sharded(4, **options.get(name, {}))
    if name == "sharded sums":
        return lambda model: _summed_on_shards(make(model)), {"micro_batches": 2}
    return make, {"clip": name == "clip"}


def _summed_on_shards(model: Any) -> nn.Module:
    model.set_accumulate_sharded(True)
    made: nn.Module = model
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@distributed(4)
def test_every_run_has_the_same_bits(every: bool, way: str) -> None:
    for name in SETTINGS if every or way == "reads" else ("full", "int8"):
        make, options = setting(name)
        runs = []
        for _ in range(2):
            with going(way):
                runs.append(trained(make, **options))
        assert equal(*runs), name
    dist.barrier()


@distributed(4)
def test_the_same_bits_on_any_hosts() -> None:
    """With `deterministic`; without it, the ranks that share a host decide."""
    one_host, hosts = [], []
    for name in ("full", "direct", "none", "clip"):
        make, options = setting(name)
        with going("reads"):
            one_host.append(trained(make, **options))
        with going("hosts"):
            if not fsdp2.transports.host.meeting.host_id():
                pytest.skip("processes may not read each other's memory here")
            hosts.append(trained(make, **options))
        with restored(), going("messages"):
            fsdp2.deterministic()
            assert equal(trained(make, **options), one_host[-1]), name
        with restored(), going("hosts"):
            fsdp2.deterministic()
            assert equal(trained(make, **options), one_host[-1]), name
    assert not equal(one_host[0], hosts[0])
    dist.barrier()


# -- those of DistributedDataParallel -------------------------------------------------------------


def _sum_in_rank_order(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook for DDP, which adds in the order of its backend otherwise."""
    mine = bucket.buffer()
    terms = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(terms, mine)
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total / dist.get_world_size())
    return future


# DDP looks at them, and does not understand those that are written as strings.
_sum_in_rank_order.__annotations__ = {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[Tensor],
}


def ddp_in_rank_order(model: nn.Module) -> nn.Module:
    made = DistributedDataParallel(model)
    made.register_comm_hook(None, _sum_in_rank_order)
    return made


@distributed(2)
def test_two_ranks_have_the_bits_of_ddp() -> None:
    """There is only one order in which to add two numbers."""
    for micro_batches in (1, 3):
        expected = trained(DistributedDataParallel, micro_batches=micro_batches)
        for strategy in ("full", "grad", "none"):
            for direct_min_bytes in (0, 1 << 20):
                make = sharded(2, strategy=strategy, direct_min_bytes=direct_min_bytes)
                assert equal(trained(make, micro_batches=micro_batches), expected), strategy
    dist.barrier()


@pytest.mark.parametrize("way", ["reads", "messages", "hosts in rank order"])
@distributed(4)
def test_more_ranks_have_the_bits_of_ddp_in_rank_order(way: str) -> None:
    for micro_batches in (1, 3):
        expected = trained(ddp_in_rank_order, micro_batches=micro_batches)
        # It would be the bits of any DDP if this order were that of its backend.
        assert not equal(trained(DistributedDataParallel, micro_batches=micro_batches), expected)
        for strategy in ("full", "grad", "none"):
            with going(way):
                make = sharded(4, strategy=strategy)
                assert equal(trained(make, micro_batches=micro_batches), expected), strategy
    dist.barrier()


@distributed(3)
def test_three_ranks_have_the_bits_of_ddp_in_rank_order() -> None:
    """The number by which sums are divided is not a power of two."""
    assert equal(trained(sharded(3)), trained(ddp_in_rank_order))
    dist.barrier()


# -- what it sets, and when it is too late --------------------------------------------------------

CLEAN = {"CUBLAS_WORKSPACE_CONFIG": None, "NCCL_ALGO": None, "FSDP2_SUM_ORDER": None}


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    with restored():
        for name, value in {**CLEAN, **values}.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield


def _settings() -> tuple[Any, ...]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.backends.cudnn.benchmark, *map(os.environ.get, CLEAN)


def test_what_it_sets() -> None:
    with environment():
        torch.backends.cudnn.benchmark = True
        fsdp2.deterministic()
        fsdp2.deterministic()  # a second call finds nothing to refuse
        nccl = "^NVLS,NVLSTree,CollnetDirect,CollnetChain"
        assert _settings() == (True, False, ":4096:8", nccl, "rank")
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        fsdp2.deterministic(warn_only=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    with environment(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Tree"):
        fsdp2.deterministic()
        assert _settings()[2:] == (":16:8", "Tree", "rank")


def refused(match: str) -> None:
    before = _settings()
    with pytest.raises(RuntimeError, match=match):
        fsdp2.deterministic()
    assert _settings() == before


def test_an_environment_that_asks_for_the_contrary() -> None:
    with environment(CUBLAS_WORKSPACE_CONFIG=":0:0"):
        refused(r"CUBLAS_WORKSPACE_CONFIG=:0:0 is not reproducible: set :4096:8 or :16:8")
    with environment(NCCL_ALGO="NVLS,Ring"):
        refused(r"NCCL_ALGO=NVLS,Ring lets switches add \(nvls\)")


def test_cuda_that_is_in_use() -> None:
    with environment(), mock.patch.object(torch.cuda, "is_initialized", return_value=True):
        refused("CUDA is in use, and CUBLAS_WORKSPACE_CONFIG is not set")
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        fsdp2.deterministic()


def test_a_process_group_of_nccl_that_exists() -> None:
    with (
        environment(),
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
    ):
        refused("a process group of NCCL exists, and NCCL_ALGO is not set")
        os.environ["NCCL_ALGO"] = "Ring"
        fsdp2.deterministic()


@distributed(4)
def test_sums_that_were_added_host_by_host() -> None:
    with going("hosts"), environment():
        trained(sharded(4))
        if not fsdp2.transports.host.meeting.host_id():
            pytest.skip("processes may not read each other's memory here")
        refused("gradients have been added host by host already")
    with going("hosts in rank order"), restored():
        trained(sharded(4))
        fsdp2.deterministic()
    dist.barrier()


@pytest.mark.parametrize(("value", "found"), [
    ("Ring", []),
    ("tree, ring", []),
    ("^NVLS,NVLSTree,CollnetDirect,CollnetChain", []),
    ("^NVLS", ["collnetchain", "collnetdirect", "nvlstree"]),
    ("Ring,NVLSTree", ["nvlstree"]),
    ("allreduce:ring", ["collnetchain", "collnetdirect", "nvls", "nvlstree"]),
    ("ring;allreduce:tree,collnetdirect;broadcast:nvls", ["collnetdirect"]),
    ("ring;allgather:nvls", []),
    ("NVLS;allreduce:ring;reduce:ring;reducescatter:^nvls,nvlstree,collnetdirect,collnetchain", []),
])  # fmt: skip
def test_algorithms_of_nccl(value: str, found: list[str]) -> None:
    assert _by_switches(value) == found
