"""Exchanges of 5 to 8 ranks, as messages and as reads of memory within the host."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness import RUNS_ON_TORCH, cached_mesh, cpu_only, distributed, ours_only
from models import EVEN_MLP, MLP, TRANSFORMER
from reference import Training, check_training, pair
from sums import DTYPES, rows, term

pytestmark = [ours_only("transports"), cpu_only("gloo")]

if not RUNS_ON_TORCH:
    import fsdp2.transports.host.exchange
    import fsdp2.transports.host.links
    import fsdp2.transports.host.meeting
    from benchmarks.transport import counting_sent, pretended_hosts
    from fsdp2 import MixedPrecisionPolicy
    from fsdp2.transports.host.exchange import Exchange
    from fsdp2.transports.host.links import HostLinks, host_links, places_of
    from fsdp2.transports.host.meeting import SWITCH
    from fsdp2.transports.host.messages import Messages
    from fsdp2.transports.host.reads import SCATTER, HostReads, key
    from fsdp2.transports.host.sums import cut, whole_bytes


def links_of(group: dist.ProcessGroup) -> HostLinks:
    links = host_links(group)
    if links is None:
        pytest.skip("processes may not read each other's memory here")
    return links


def ways(group: dist.ProcessGroup) -> list[Any]:
    return [Messages(group), HostReads(links_of(group))]


def some_ranks(num: int) -> dist.ProcessGroup | None:
    """A group of the first ``num`` ranks; None on the others."""
    group = dist.new_group(list(range(num)))
    return group if isinstance(group, dist.ProcessGroup) else None


def mean(terms: list[Tensor], dtype: torch.dtype) -> Tensor:
    """In rank order, in ``dtype``."""
    total = terms[0].to(dtype)
    for each in terms[1:]:
        total = total + each.to(dtype)
    return total / len(terms)


@distributed(6, long=(8,))
def test_sums_are_those_in_rank_order_bit_for_bit() -> None:
    """Of several dtypes in one exchange, with parts that the last ranks do not have."""
    for num in range(5, dist.get_world_size() + 1):
        group = some_ranks(num)
        if group is None:
            continue
        me = group.rank()
        for number, way in enumerate(ways(group)):
            # Of the second tensor ranks have 3 rows of 16 each until there are none left.
            numels = rows(num)
            parts, outs, expected = [], [], []
            for wire, wide in DTYPES:
                for sizes in numels:
                    parts.append(term(me, sum(sizes), wire).split(sizes))
                    padding = 5
                    outs.append(torch.full((sizes[me] + padding,), 7.0, dtype=wide))
                    whole = [term(r, sum(sizes), wire).split(sizes)[me] for r in range(num)]
                    expected.append(mean(whole, wide))
            way.scatter(parts, outs, 1000 + 100 * number)()
            for out, right in zip(outs, expected, strict=True):
                assert torch.equal(out[: len(right)], right), (num, number, out.dtype)
                assert (out[len(right) :] == 7).all()
    dist.barrier()


@distributed(6, long=(8,))
def test_a_large_all_reduce_sends_each_byte_twice_and_gives_equal_bits() -> None:
    for num in range(5, dist.get_world_size() + 1):
        group = some_ranks(num)
        if group is None:
            continue
        me = group.rank()
        for number, way in enumerate(ways(group)):
            for dtype in (torch.float32, torch.bfloat16):
                # One that divides evenly, one that leaves the last ranks a part that is shorter.
                sizes = [num * 65536, 70_001, 1]
                tensors = [term(me, numel, dtype) for numel in sizes]
                with counting_sent() as sent:
                    way.all_reduce(tensors[:1], 50_000)()
                nbytes = sizes[0] * dtype.itemsize
                assert nbytes > whole_bytes(num, one_host=False)
                assert sent == {"all_reduce": 2 * nbytes * (num - 1) // num}
                way.all_reduce(tensors[1:], 60_000)()
                for numel, found in zip(sizes, tensors, strict=True):
                    right = mean([term(r, numel, dtype) for r in range(num)], dtype)
                    assert torch.equal(found, right), (num, number, numel, dtype)
    dist.barrier()


@distributed(6, long=(8,))
def test_both_ways_of_an_all_reduce_give_the_bits_of_rank_order() -> None:
    """Of messages: no elements, one, primes, several tensors at once; counted bytes."""
    sizes = [0, 1, 2, 7, 1009, 70_001]
    for num in (2, 3, *range(5, dist.get_world_size() + 1)):
        group = some_ranks(num)
        if group is None:
            continue
        way, me = Messages(group), group.rank()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            right = [mean([term(r, n, dtype) for r in range(num)], dtype) for n in sizes]
            for number, call in enumerate(("in_one", "in_two_phases")):
                tensors = [term(me, numel, dtype) for numel in sizes]
                with counting_sent() as sent:
                    getattr(way, call)(tensors, 100 * number)()
                for found, expected in zip(tensors, right, strict=True):
                    assert torch.equal(found, expected), (num, dtype, number, len(found))
                own = [len(cut(tensor, num)[me]) for tensor in tensors]
                # All to all others; or what others add up, and the own sums to all.
                numel = (num - 1) * (sum(own) if number else sum(sizes))
                numel += sum(sizes) - sum(own) if number else 0
                assert sent["all_reduce"] == numel * dtype.itemsize
    dist.barrier()


@distributed(3)
def test_an_all_reduce_is_one_exchange_up_to_what_was_measured() -> None:
    """Of ranks of one host that may not read, and of ranks of hosts of their own."""
    for one_host in (True, False):
        environment = {SWITCH: "0"} if one_host else {}
        with (
            mock.patch.dict(os.environ, environment),
            pretended_hosts([0, 0, 0] if one_host else [0, 1, 2]),
        ):
            exchange = Exchange(new_group(), reads=True)
            exchange.connect()
            places = places_of(exchange.group)
            assert places is not None
            if not places.one_host and one_host:
                pytest.skip("nothing tells here which ranks share a host")
            assert places.one_host == one_host
            limit = whole_bytes(3, one_host=one_host)
            for nbytes in (limit, limit + 4):
                with counting_sent() as sent:
                    exchange.all_reduce([torch.ones(nbytes // 4)], 0)()
                told = places.all_reduce(nbytes).total
                # (Of a length that is no multiple of 16 elements, parts are not quite even.)
                assert sent["all_reduce"] == pytest.approx(told, abs=2 * 3 * 64)
                assert (told == 2 * nbytes) == (nbytes == limit)
    dist.barrier()


def as_messages(group: dist.ProcessGroup) -> None:
    """In the place of `host_links`."""


def assert_replicas_are_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group("replicate")
    for param in model.parameters():
        local: Any = param.to_local()  # type: ignore[attr-defined]
        found = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(found, local.detach().contiguous(), group=group)
        assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("reads", [True, False])
@distributed(6, long=(8,))
def test_training(reads: bool) -> None:
    """Layers with fewer rows than there are ranks, in fp64 and with gradients sent in bf16."""
    links = host_links if reads else as_messages
    bf16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    with mock.patch.object(fsdp2.transports.host.exchange, "host_links", links):
        size = dist.get_world_size()
        for shape in ((size,), (2, size // 2), (size // 2, 2)):
            hybrid = len(shape) == 2
            mesh = cached_mesh(*shape, names=("replicate", "shard") if hybrid else None)
            training = Training(steps=2, bitwise=False)
            for case in (MLP, TRANSFORMER):
                model, _ = check_training(case, training, mesh=mesh, direct_min_bytes=0)
                if hybrid:
                    assert_replicas_are_equal(model, mesh)
            model, _ = pair(EVEN_MLP, dtype=torch.float32, mesh=mesh, direct_min_bytes=0, **bf16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                batch = EVEN_MLP.batch(step, dist.get_rank(), torch.float32)
                EVEN_MLP.loss(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if hybrid:
                assert_replicas_are_equal(model, mesh)


@pytest.mark.long
@pytest.mark.parametrize("reads", [True, False])
@distributed(20)
def test_training_on_twenty_ranks(reads: bool) -> None:
    """Most of which have no rows of some layers; replicas are bitwise equal."""
    links = host_links if reads else as_messages
    with mock.patch.object(fsdp2.transports.host.exchange, "host_links", links):
        for shape in ((20,), (20, 1)):
            mesh = cached_mesh(*shape, names=("replicate", "shard") if len(shape) == 2 else None)
            training = Training(steps=2, bitwise=False)
            model, _ = check_training(MLP, training, mesh=mesh, direct_min_bytes=0)
            if len(shape) == 2:
                assert_replicas_are_equal(model, mesh)


def new_group(timeout_s: float = 30.0) -> dist.ProcessGroup:
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


@distributed(2)
def test_all_ranks_read_or_none_does() -> None:
    """One rank may not read, or has the switch off."""

    def refuse(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise PermissionError

    links_of(new_group())
    with mock.patch.object(fsdp2.transports.host.meeting, "_prove", refuse):
        assert host_links(new_group()) is None
    for step in ("_call", "_answer"):
        with mock.patch.object(fsdp2.transports.host.meeting, step, refuse):
            assert host_links(new_group()) is None
    with mock.patch.dict(os.environ, {SWITCH: str(dist.get_rank())}):
        assert host_links(new_group()) is None


@distributed(2)
def test_ranks_that_find_each_others_memory_and_not_sockets_do_not_wait() -> None:
    """As in containers that share their processes, and have networks of their own."""

    def of_this_rank(name: str) -> str:
        return f"\0{dist.get_rank()} {name}"

    with mock.patch.object(fsdp2.transports.host.meeting, "_address", of_this_rank):
        assert host_links(new_group(timeout_s=5)) is None


@distributed(2)
def test_ranks_may_wait_in_different_orders() -> None:
    """Of exchanges in two groups, and of two with one tag, which keep their order."""
    both = [HostReads(links_of(new_group())) for _ in range(2)]
    me = dist.get_rank()
    outs = [torch.zeros(4) for _ in range(3)]
    waits = []
    for i, (way, tag) in enumerate(((both[0], 1), (both[1], 1), (both[0], 1))):
        parts = [(torch.full((4,), 10.0 * i + me), torch.full((4,), 20.0 * i + me))]
        waits.append(way.scatter(parts, [outs[i]], tag))
    for wait in waits if me else reversed(waits):
        wait()
    for i, out in enumerate(outs):
        assert out.tolist() == [(10.0 + 10 * me) * i + 0.5] * 4


def exchange(way: HostReads, numel: int = 4) -> Callable[[], None]:
    return way.scatter([(torch.ones(numel), torch.ones(numel))], [torch.zeros(numel)], 1)


@distributed(2)
def test_a_rank_that_waits_elsewhere_is_read_and_reads() -> None:
    """In a collective of the user's, for a rank that waits for it to read."""
    way = HostReads(links_of(new_group(10.0)))
    if dist.get_rank() == 0:
        time.sleep(0.2)  # the other one begins first, and finds nothing to read yet
        exchange(way)()
        dist.barrier()
    else:
        wait = exchange(way)
        dist.barrier()
        wait()


@distributed(2)
def test_a_rank_that_gives_up_is_noticed_at_once() -> None:
    links = links_of(new_group())
    way = HostReads(links)
    exchange(way)()
    if dist.get_rank() == 1:
        links.close()
    else:
        for _ in range(2):  # and every later exchange of the group fails likewise
            with pytest.raises(dist.DistNetworkError, match=r"have ended, or given up"):
                exchange(way)()
    dist.barrier()


@distributed(2)
def test_a_fork_of_a_rank_does_not_hide_that_the_rank_has_ended() -> None:
    """A worker that loads data has copies of all descriptors, and may outlive its rank."""
    links = links_of(new_group(10.0))
    exchange(HostReads(links))()
    if dist.get_rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
            child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        try:
            links.close()
            dist.barrier()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    else:
        with pytest.raises(dist.DistNetworkError, match=r"have ended, or given up"):
            exchange(HostReads(links))()
        dist.barrier()


@distributed(2)
def test_a_rank_that_gives_up_waits_for_its_thread_to_end_reading() -> None:
    """Else memory that is freed next would be written."""
    links = links_of(new_group())
    done = threading.Event()

    def give_up() -> None:
        with pytest.raises(dist.DistNetworkError, match="no more"):
            links.fail("no more")
        done.set()

    thread = threading.Thread(target=give_up)
    with fsdp2.transports.host.links._lock:  # as the thread has it that reads
        thread.start()
        assert not done.wait(0.2)
        assert links._sockets
    assert done.wait(10.0)
    thread.join()
    dist.barrier()


@distributed(2)
def test_ctrl_c_while_a_rank_reads_ends_the_exchanges_of_the_group() -> None:
    """What it was reading will never be whole: the others must not wait for it."""
    links = links_of(new_group())
    way = HostReads(links)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        with (
            mock.patch.object(fsdp2.transports.host.links, "read", interrupted),
            fsdp2.transports.host.links._lock,  # not in the thread, which gets no signals
            pytest.raises(KeyboardInterrupt),
        ):
            exchange(way)()
        with pytest.raises(dist.DistNetworkError, match="interrupted by KeyboardInterrupt"):
            exchange(way)
    else:
        with pytest.raises(dist.DistNetworkError, match="given up"):
            exchange(way)()
    dist.barrier()


@distributed(2)
def test_an_error_in_the_thread_that_serves_does_not_end_it_for_other_groups() -> None:
    """Of a kind that nobody expects there; the ranks of its group hear of it."""
    broken, sound = links_of(new_group()), HostReads(links_of(new_group()))
    me = dist.get_rank()

    def surprise(_: Any) -> None:
        raise IndexError("what a bug raises")

    if me == 1:
        # Begun before the other has posted: then it is the thread here that reads.
        operation = broken.begin(8, {0: []}, surprise)
        dist.barrier()
        deadline = time.monotonic() + 20
        while not broken._broken and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(dist.DistNetworkError, match="IndexError: what a bug raises"):
            operation.wait()
    else:
        dist.barrier()
        with pytest.raises(dist.DistNetworkError, match="given up"):
            broken.begin(8, {1: []}, lambda _: None).wait()
    for _ in range(2):
        if me == 0:
            exchange(sound)()
            dist.barrier()
        else:
            wait = exchange(sound)
            dist.barrier()  # for a rank that waits for this one to read
            wait()
    dist.barrier()


@distributed(2)
def test_the_thread_that_serves_outlives_any_error() -> None:
    """Else a rank that waits elsewhere would never be read, and read nothing."""
    way = HostReads(links_of(new_group()))
    me = dist.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        told: list[str] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
        if me == 0:
            dist.barrier()  # it has begun, and finds nothing to read yet
            exchange(way)()
            dist.barrier()
        else:
            failed, serve = threading.Event(), fsdp2.transports.host.links._serve

            def fails_once(timeout_s: float) -> None:
                if threading.current_thread().name == "fsdp2 exchange" and not failed.is_set():
                    failed.set()
                    raise MemoryError("no memory for a list")
                serve(timeout_s)

            monkeypatch.setattr(fsdp2.transports.host.links, "_serve", fails_once)
            wait = exchange(way)
            dist.barrier()
            dist.barrier()  # for a rank that waits for this one to read
            wait()
            assert failed.is_set()
            assert told == ["no memory for a list"]
    dist.barrier()


@distributed(2)
def test_what_was_read_of_a_rank_that_gave_up_does_not_count() -> None:
    """It posts, reads, and fails: the memory may be another's by the time it is read."""
    links = links_of(new_group())
    way = HostReads(links)
    with (
        fsdp2.transports.host.links._lock if dist.get_rank() == 0 else nullcontext()
    ):  # no thread reads
        if dist.get_rank() == 0:
            wait = exchange(way)
        dist.barrier()
        if dist.get_rank() == 1:
            wait = exchange(way)
            assert links._channels[key(1, SCATTER)].num_begun == 1
            assert not links._channels[key(1, SCATTER)].unread  # read and acknowledged
            links.close()
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistNetworkError, match=r"ended, or given up"):
                wait()
    dist.barrier()


@distributed(2)
def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    links = links_of(new_group(1.0))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistNetworkError, match=r"after 1 s; .* \[1\] did not come"):
            exchange(HostReads(links))()
    dist.barrier()


@distributed(2)
def test_ranks_that_expect_other_sizes_fail() -> None:
    way = HostReads(links_of(new_group(20.0)))
    with pytest.raises(dist.DistNetworkError, match=r"other sizes|given up"):
        exchange(way, 4 + dist.get_rank())()
    dist.barrier()
