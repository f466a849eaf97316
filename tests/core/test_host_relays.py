"""Exchanges of groups with several ranks on each of several hosts, which are pretended here."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.transport import BETWEEN, KINDS, counting_sent, pretended_hosts
from harness import RUNS_ON_TORCH, cached_mesh, cpu_only, distributed, ours_only
from models import EVEN_MLP, MLP, TRANSFORMER
from reference import Training, check_training, pair
from sums import DTYPES, rows, term

pytestmark = [ours_only("transports"), cpu_only("gloo")]

if not RUNS_ON_TORCH:
    import fsdp2
    from by_keywords import estimate
    from fsdp2 import CommPolicy, MixedPrecisionPolicy, explain, shard_model
    from fsdp2.transports.compressed.transports import Wire
    from fsdp2.transports.host.exchange import Exchange
    from fsdp2.transports.host.links import HostLinks, connect
    from fsdp2.transports.host.meeting import ORDER, SWITCH
    from fsdp2.transports.host.relays import HostRelays
    from fsdp2.transports.host.sums import WHOLE_BYTES

# By ranks: the host of each. Even, uneven, one rank alone, out of order, many, and more ranks than
# the others have.
PLACES: dict[int, list[list[int]]] = {
    4: [[0, 0, 1, 1], [0, 1, 1, 0]],
    5: [[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]],
    6: [[0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 1]],
    8: [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2, 2, 3]],
}


class CountingGroup:
    """A group that counts the bytes of its messages, by receiver."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sent: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.sent[peer] += tensors[0].nbytes
        return self.group.send(tensors, peer, tag)


def relays(group: dist.ProcessGroup, places: Sequence[int]) -> tuple[HostRelays, CountingGroup]:
    with pretended_hosts(places):
        links = connect(group)
    if not isinstance(links, HostLinks):
        pytest.skip("processes may not read each other's memory here")
    counting: Any = CountingGroup(group)
    return HostRelays(counting, links), counting


def each_group(*nums: int) -> Iterator[tuple[dist.ProcessGroup, list[int]]]:
    for num in nums:
        group = dist.new_group(list(range(num)))
        if isinstance(group, dist.ProcessGroup):
            for places in PLACES[num]:
                yield group, places


def total(terms: Sequence[Tensor]) -> Tensor:
    result = terms[0].clone()
    for each in terms[1:]:
        result = result + each
    return result


def mean(terms: list[Tensor], dtype: torch.dtype, places: Sequence[int]) -> Tensor:
    """In rank order within each host, then over hosts in the order of their first ranks."""
    wide = [each.to(dtype) for each in terms]
    hosts = list(dict.fromkeys(places))
    sums = [total([wide[r] for r in range(len(terms)) if places[r] == host]) for host in hosts]
    return total(sums) / len(terms)


def bytes_between_hosts(counting: CountingGroup, places: Sequence[int]) -> Counter[tuple[int, int]]:
    """By (from, to) of hosts; nothing is sent within one."""
    group = counting.group
    mine = torch.tensor([counting.sent[r] for r in range(group.size())])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    found: Counter[tuple[int, int]] = Counter()
    for sender, sent in enumerate(everyone):
        for receiver, nbytes in enumerate(sent.tolist()):
            assert not nbytes or places[sender] != places[receiver]
            found[places[sender], places[receiver]] += nbytes
    counting.sent.clear()
    return found


def pairs(places: Sequence[int]) -> list[tuple[int, int]]:
    hosts = set(places)
    return [(a, b) for a in hosts for b in hosts if a != b]


@distributed(8)
def test_a_shard_crosses_each_link_once() -> None:
    """Of several tensors, with rows that the last ranks do not have."""
    for group, places in each_group(4, 5, 6, 8):
        way, counting = relays(group, places)
        num, me = group.size(), group.rank()
        rows = [[7] * num, [max(0, min(3, 11 - 3 * r)) for r in range(num)], [60_000] * num]
        widest = [max(numels) for numels in rows]
        inputs = [term(me, width, torch.float32) for width in widest]
        outputs = [torch.full((num * width,), torch.nan) for width in widest]
        plan: Any = SimpleNamespace(inputs=inputs, outputs=outputs, rows=rows, messages=None)
        for _ in range(2):
            wait = way.gather(plan, 0)
            for own, output, width in zip(inputs, outputs, widest, strict=True):
                output[me * width : (me + 1) * width] = own
            wait()
            for output, width, numels in zip(outputs, widest, rows, strict=True):
                for rank, found in enumerate(output.split(width)):
                    right = term(rank, width, torch.float32)[: numels[rank]]
                    assert torch.equal(found[: numels[rank]], right), (places, rank)
            crossed = bytes_between_hosts(counting, places)
            for here, there in pairs(places):
                held = sum(n[r] for n in rows for r in range(num) if places[r] == here)
                assert crossed[here, there] == 4 * held, places
    dist.barrier()


@distributed(8)
def test_a_host_sends_one_sum_for_each_rank_of_another() -> None:
    """Bit for bit the sum within hosts and then over them; parts of no rows, and padding."""
    for group, places in each_group(4, 5, 6, 8):
        way, counting = relays(group, places)
        num, me = group.size(), group.rank()
        numels = rows(num)
        parts, outs, expected = [], [], []
        for wire, wide in DTYPES:
            for sizes in numels:
                parts.append(term(me, sum(sizes), wire).split(sizes))
                outs.append(torch.full((sizes[me] + 5,), 7.0, dtype=wide))
                whole = [term(r, sum(sizes), wire).split(sizes)[me] for r in range(num)]
                expected.append(mean(whole, wide, places))
        way.scatter(parts, outs, 100)()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out[: len(right)], right), (places, out.dtype)
            assert (out[len(right) :] == 7).all()
        crossed = bytes_between_hosts(counting, places)
        for here, there in pairs(places):
            # One rank alone sends what it has.
            alone = places.count(here) == 1
            itemsize = sum((wire if alone else wide).itemsize for wire, wide in DTYPES)
            owned = sum(n[r] for n in numels for r in range(num) if places[r] == there)
            assert crossed[here, there] == itemsize * owned, places
    dist.barrier()


@distributed(8)
def test_an_all_reduce_crosses_links_twice_and_gives_equal_bits() -> None:
    for group, places in each_group(4, 5, 6, 8):
        way, counting = relays(group, places)
        num, me = group.size(), group.rank()
        for dtype in (torch.float32, torch.bfloat16):
            sizes = [num * 16384, 70_001, 1]
            assert sizes[0] * dtype.itemsize >= WHOLE_BYTES
            tensors = [term(me, numel, dtype) for numel in sizes]
            way.all_reduce(tensors[:1], 50_000)()
            crossed = bytes_between_hosts(counting, places)
            for here, there in pairs(places):
                both = places.count(here) + places.count(there)
                assert crossed[here, there] == 16384 * dtype.itemsize * both
            way.all_reduce(tensors[1:], 60_000)()
            counting.sent.clear()
            for numel, found in zip(sizes, tensors, strict=True):
                terms = [term(r, numel, dtype) for r in range(num)]
                assert torch.equal(found, mean(terms, dtype, places)), (places, numel, dtype)
    dist.barrier()


@distributed(4)
def test_rank_order_by_choice() -> None:
    """Of one rank: then all add as on one host."""
    places = [0, 0, 1, 1]
    group = dist.new_group(list(range(4)))
    assert isinstance(group, dist.ProcessGroup)
    me = group.rank()
    with mock.patch.dict(os.environ, {ORDER: "rank"} if me == 2 else {}):
        way, _ = relays(group, places)
    out = torch.zeros(40_000)
    way.scatter([term(me, 160_000, torch.float32).split(40_000)], [out], 1)()
    terms = [term(r, 160_000, torch.float32).split(40_000)[me] for r in range(4)]
    assert torch.equal(out, mean(terms, torch.float32, [0] * 4))
    assert not torch.equal(out, mean(terms, torch.float32, places))
    flat = term(me, 160_000, torch.float32)
    way.all_reduce([flat], 10)()
    whole = [term(r, 160_000, torch.float32) for r in range(4)]
    assert torch.equal(flat, mean(whole, torch.float32, [0] * 4))


@distributed(4)
def test_ranks_may_wait_in_different_orders() -> None:
    """Gathers of two groups, which take two steps on a host."""
    both = []
    for _ in range(2):
        group = dist.new_group(list(range(4)))
        assert isinstance(group, dist.ProcessGroup)
        both.append(relays(group, [0, 0, 1, 1])[0])
    me = dist.get_rank()
    plans: list[Any] = []
    for number in range(2):
        inputs, outputs = [torch.full((4,), 10.0 * number + me)], [torch.zeros(16)]
        plans.append(SimpleNamespace(inputs=inputs, outputs=outputs, rows=[[4] * 4], messages=None))
    waits: list[Callable[[], None]] = [
        way.gather(plan, 1) for way, plan in zip(both, plans, strict=True)
    ]
    for wait in waits if me % 2 else reversed(waits):
        wait()
    for number, plan in enumerate(plans):
        for rank in {0, 1, 2, 3} - {me}:
            assert plan.outputs[0][4 * rank] == 10.0 * number + rank


@distributed(4)
def test_an_exchange_is_over_when_the_others_have_read() -> None:
    """Then inputs, and outputs that others of the host read too, may change or be freed."""
    group = dist.new_group(list(range(4)))
    assert isinstance(group, dist.ProcessGroup)
    way, _ = relays(group, [0, 0, 1, 1])
    me = group.rank()
    real = HostLinks.read

    def late(*args: Any) -> None:
        time.sleep(0.1)
        real(*args)

    inputs, outputs = [torch.full((4,), 10.0 + me)], [torch.zeros(16)]
    plan: Any = SimpleNamespace(inputs=inputs, outputs=outputs, rows=[[4] * 4], messages=None)
    terms, out = term(me, 160_000, torch.float32), torch.zeros(40_000)
    with mock.patch.object(HostLinks, "read", late if me % 2 else real):
        way.gather(plan, 1)()
        found = outputs[0].clone()
        inputs[0].fill_(-1)
        outputs[0].fill_(-1)
        way.scatter([terms.split(40_000)], [out], 2)()
        terms.fill_(-1)
        replicated = term(me, 160_000, torch.float32)
        assert replicated.nbytes >= WHOLE_BYTES
        way.all_reduce([replicated], 10)()
        summed = replicated.clone()
        replicated.fill_(-1)
        dist.barrier()
    for rank in {0, 1, 2, 3} - {me}:
        assert (found[4 * rank : 4 * rank + 4] == 10.0 + rank).all()
    whole = [term(r, 160_000, torch.float32).split(40_000)[me] for r in range(4)]
    assert torch.equal(out, mean(whole, torch.float32, [0, 0, 1, 1]))
    whole = [term(r, 160_000, torch.float32) for r in range(4)]
    assert torch.equal(summed, mean(whole, torch.float32, [0, 0, 1, 1]))
    dist.barrier()


@distributed(4)
def test_an_error_between_hosts_is_raised_on_all_ranks_of_a_host() -> None:
    """Rank 3 gives up, and ranks of the other host wait for what it would send."""
    group = dist.new_group(list(range(4)), timeout=datetime.timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    way, _ = relays(group, [0, 0, 1, 1])
    me = group.rank()
    plan: Any = SimpleNamespace(
        inputs=[torch.ones(4)], outputs=[torch.zeros(16)], rows=[[4] * 4], messages=None
    )
    if me != 3:
        with pytest.raises(dist.DistNetworkError, match=r"did not come|have ended|timed out"):
            way.gather(plan, 1)()
        # gloo closes the connection on which it has waited in vain: the rank that did so may not
        # even begin to receive there. Otherwise it is the links that know.
        text = r"did not come|have ended|timed out|pair closure|closed"
        with pytest.raises(RuntimeError, match=text):
            way.gather(plan, 1)
    dist.barrier()


@distributed(2)
def test_posts_of_many_ranges_arrive() -> None:
    """More than fit into one message: 4,000, twice that, and one more."""
    group = dist.new_group(list(range(2)))
    assert isinstance(group, dist.ProcessGroup)
    links = connect(group)
    if not isinstance(links, HostLinks):
        pytest.skip("processes may not read each other's memory here")
    for number, count in enumerate((3999, 4000, 4001, 8000, 0)):
        found: list[Any] = []
        links.begin(number, {1 - group.rank(): list(range(2 * count))}, found.append).wait()
        assert found == [{1 - group.rank(): list(range(2 * count))}]
    dist.barrier()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@distributed(8)
def test_training(every: bool) -> None:
    """Layers with fewer rows than there are ranks; replicas that are on one host and on others."""
    for places in PLACES[8] if every else PLACES[8][1:]:
        with pretended_hosts(places):
            for shape in ((8,), (4, 2), (2, 4)) if every else ((8,), (4, 2)):
                names = ("replicate", "shard") if len(shape) == 2 else None
                mesh = cached_mesh(*shape, names=names)
                training = Training(steps=2, bitwise=False)
                for case in (MLP, TRANSFORMER) if every else (MLP,):
                    model, _ = check_training(case, training, mesh=mesh, direct_min_bytes=0)
                model, _ = pair(EVEN_MLP, dtype=torch.float32, mesh=mesh)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(2):
                    batch = EVEN_MLP.batch(step, dist.get_rank(), torch.float32)
                    EVEN_MLP.loss(model, *batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if names is not None:
                    group = mesh.get_group("replicate")
                    for param in model.parameters():
                        local: Any = param.to_local()  # type: ignore[attr-defined]
                        found = [torch.empty_like(local) for _ in range(group.size())]
                        dist.all_gather(found, local.detach().contiguous(), group=group)
                        assert all(torch.equal(one, found[0]) for one in found)


@contextmanager
def counting_between(places: Sequence[int]) -> Iterator[Counter[str]]:
    """Bytes that this rank sends to other hosts: in full, and of rows under a `CommPolicy`."""
    found: Counter[str] = Counter()
    exchange = Wire.all_to_all

    def counted(self: Wire, received: Tensor, sent: Tensor) -> Any:
        ranks = dist.get_process_group_ranks(self.group)
        away = sum(places[rank] != places[dist.get_rank()] for rank in ranks)
        found["rows"] += away * sent[0].nbytes
        return exchange(self, received, sent)

    def gathered(self: Exchange, rows: Tensor, mine: Tensor, tag: int) -> Any:
        finish = gather(self, rows, mine, tag)
        if finish is None:  # a ring of gloo, through each host once
            ranks = dist.get_process_group_ranks(self.group)
            near = sum(places[rank] == places[dist.get_rank()] for rank in ranks)
            found["rows"] += (len(rows) - 1) * mine.nbytes // near if near < len(ranks) else 0
        return finish

    gather = Exchange.gather_rows
    with (
        counting_sent(places) as sent,
        mock.patch.object(Wire, "all_to_all", counted),
        mock.patch.object(Exchange, "gather_rows", gathered),
    ):
        yield found
    found["in full"] = sum(sent[kind + BETWEEN] for kind in KINDS)


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
INT8 = CommPolicy(gather=torch.int8, reduce=torch.int8)
SENT: dict[str, dict[str, Any]] = {
    "full": {},
    "full, bf16": {"mp_policy": LOW},
    "grad": {"strategy": "grad"},
    "none": {"strategy": "none"},
    "hybrid": {"strategy": "hybrid"},
    "secondary": {"reshard_after_forward": 2},
    "int8": {"comm_policy": INT8},
    "int8, two hops": {"comm_policy": replace(INT8, ranks_per_node=2)},
    "int8, hybrid": {"comm_policy": INT8, "strategy": "hybrid"},
    "int8, none": {"comm_policy": INT8, "strategy": "none"},
    "int8, secondary": {
        "comm_policy": CommPolicy(secondary=torch.int8), "reshard_after_forward": 2
    },
}  # fmt: skip


def _blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(3)))


@distributed(4)
def test_bytes_between_hosts_are_those_that_explain_and_estimate_tell() -> None:
    """In full and in fewer bytes: of gathers each row crosses once, of all-to-alls each."""
    places = [0, 0, 1, 1]
    batch = torch.ones(2, 192)
    for name, options in SENT.items():
        hybrid = options.get("strategy") == "hybrid"
        with pretended_hosts(places):
            mesh = cached_mesh(2, 2) if hybrid else None
            options = {**options, "wrap": torch.nn.Linear, "direct_min_bytes": 500}
            model = shard_model(_blocks(), mesh, **options)
            for step in range(2):
                with counting_between(places) as found:
                    model(batch).sum().backward()
                if step == 0:
                    model.zero_grad()
            told = explain(model).totals
        if told.sent_between_hosts is None:
            pytest.skip("processes may not read each other's memory here")
        shape = (2, 2) if hybrid else 4
        options |= {"device_type": "cpu", "ranks_per_node": 2}
        assert told.sent_between_hosts == found.total() > 0, name
        assert explain(_blocks(), shape, **options).totals == told, name
        made = estimate(_blocks(), shape, batch, loss_fn=torch.sum, **options)
        assert sum(row.between_nodes for row in made.traffic) == found.total(), name
        assert made.sent == told.sent_bytes, name
    dist.barrier()


@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
@distributed(4)
def test_ranks_of_one_host_whose_memory_is_not_read_send_nothing_between_hosts(
    places: list[int],
) -> None:
    """To each other: what `explain` tells of them is what they send."""
    for unread in ([0, 1, 2, 3], [1]):
        switch = "0" if dist.get_rank() in unread else "1"
        for name in ("full", "full, bf16", "hybrid", "none", "int8"):
            options = {**SENT[name], "wrap": torch.nn.Linear, "direct_min_bytes": 500}
            with pretended_hosts(places), mock.patch.dict(os.environ, {SWITCH: switch}):
                mesh = cached_mesh(2, 2) if name == "hybrid" else None
                model = shard_model(_blocks(), mesh, **options)
                model(torch.ones(2, 192)).sum().backward()
                model.zero_grad()
                with counting_between(places) as found:
                    model(torch.ones(2, 192)).sum().backward()
                assert explain(model).totals.sent_between_hosts == found.total(), (name, unread)
    dist.barrier()


def _train_until_one_is_killed(rank: int, folder: str, victim: int, answers: Any) -> None:
    """The main function of a rank: of two hosts with two ranks each, of which one is killed."""
    store = dist.FileStore(f"{folder}/store", 4)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timeout)
    torch.set_num_threads(1)
    with pretended_hosts([0, 0, 1, 1]):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
        try:
            for step in range(1000):
                if step == 3 and rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.ones(2, 64)).sum().backward()
            answers.put((rank, "no error", 0.0))
        except RuntimeError as error:
            answers.put((rank, f"{type(error).__name__}: {error}", time.monotonic()))
        answers.close()
        answers.join_thread()
    os._exit(0)  # the group cannot be left in order


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_ends_the_step_of_all_others_at_once(
    victim: int, tmp_path: Path
) -> None:
    """Of its host, and of the other; long before the timeout of the group."""
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    ranks = [
        context.Process(target=_train_until_one_is_killed, args=(r, str(tmp_path), victim, answers))
        for r in range(4)
    ]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in range(3):
            rank, text, at = answers.get(timeout=200)
            found[rank] = (text, at)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert set(found) == {0, 1, 2, 3} - {victim}
    moments = [at for _, at in found.values()]
    assert max(moments) - min(moments) < 100
    for rank, (text, _) in found.items():
        assert f"Rank {rank}: " in text, text
        assert "unit" in text, text
        assert "failed, waiting for rank" in text, text
