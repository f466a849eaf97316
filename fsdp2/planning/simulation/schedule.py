"""Schedules tasks on streams: a discrete-event simulation in pure Python.

Tasks on one stream run one after the other, and after the tasks that they wait for. Tasks that use
the same link at the same time share its bandwidth equally; tasks that occupy multiprocessors slow
others down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Cost

_EPSILON_S = 1e-15


@dataclass(frozen=True)
class Task:
    """Work on a stream; tasks are identified by their index in the list.

    Attributes:
        after: indices of earlier tasks that must end before it begins.
    """

    stream: str
    cost: Cost
    after: tuple[int, ...] = ()


@dataclass
class Span:
    """When a task runs, in seconds."""

    begin: float
    end: float


@dataclass
class _Running:
    task: int
    fixed_s: float
    shared_s: float
    link: str | None
    slowed_by: float
    occupies: bool


def schedule(tasks: Sequence[Task]) -> list[Span]:
    """Compute the beginning and end of every task.

    Takes time proportional to the number of tasks: a task is handled when it begins, when its fixed
    part ends and when it ends, together with the few tasks that run at that time.

    Raises:
        ValueError: if a task waits for a later one, which would never begin.
    """
    for i, task in enumerate(tasks):
        if any(other >= i or other < 0 for other in task.after):
            raise ValueError(
                f"Task {i} waits for {task.after}: a task can only wait for earlier ones"
            )
    queues: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(i)
    heads = dict.fromkeys(queues, 0)
    spans = [Span(-1.0, -1.0) for _ in tasks]
    running: list[_Running] = []
    busy: set[str] = set()
    now = 0.0
    left = len(tasks)
    while left:
        _begin(tasks, queues, heads, busy, spans, running, now)
        now += _advance(running)
        for done in [r for r in running if r.fixed_s <= 0 and r.shared_s <= 0]:
            running.remove(done)
            spans[done.task].end = now
            busy.discard(tasks[done.task].stream)
            left -= 1
    return spans


def _begin(tasks, queues, heads, busy, spans, running, now) -> None:
    """Start all tasks that can start now."""
    for stream, queue in queues.items():
        if stream in busy or heads[stream] == len(queue):
            continue
        i = queue[heads[stream]]
        if any(spans[other].end < 0 for other in tasks[i].after):
            continue
        heads[stream] += 1
        busy.add(stream)
        cost = tasks[i].cost
        spans[i].begin = now
        running.append(
            _Running(i, cost.fixed_s, cost.shared_s, cost.link, cost.slowed_by, cost.occupies)
        )


def _advance(running: list[_Running]) -> float:
    """Advance time to the next change; returns the time that passed."""
    users: dict[str | None, int] = {}
    for each in running:
        if each.fixed_s <= 0:
            users[each.link] = users.get(each.link, 0) + 1
    occupied = any(each.occupies for each in running)
    step = min(
        each.fixed_s / _speed(each, occupied)
        if each.fixed_s > 0
        else each.shared_s * users[each.link]
        for each in running
    )
    step = max(step, 0.0)
    for each in running:
        if each.fixed_s > 0:
            each.fixed_s = _less(each.fixed_s, step * _speed(each, occupied))
        else:
            each.shared_s = _less(each.shared_s, step / users[each.link])
    return step


def _speed(each: _Running, occupied: bool) -> float:
    return 1 - each.slowed_by if occupied else 1.0


def _less(seconds: float, passed: float) -> float:
    rest = seconds - passed
    return rest if rest > _EPSILON_S + 1e-12 * seconds else 0.0
