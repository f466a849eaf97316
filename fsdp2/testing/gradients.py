"""Follows every gradient to its sharded parameter: see `account_gradients`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..features.finalization import Finalization
from ..features.middle import Middle
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit
from ..runtime.unit_grads import UnitGrads
from ..sharding.param import ShardedParam
from .ledger import PLACES, Account, GradientLostError, account_of, open_account, watch

_UNREDUCED = ("on_param", "taken")


@contextmanager
def account_gradients() -> Iterator[None]:
    """Follow every gradient that autograd produces, and raise if one does not arrive.

    Covers all sharded modules of this process, including existing ones. The context may begin and
    end anywhere in training, also between forward and backward or between micro-batches; earlier
    gradients are not tracked. Each accumulation into an unsharded parameter is recorded, by
    parameter and micro-batch, and followed through accumulation and reductions to the ``.grad`` of
    the sharded parameter. All of them must have arrived at the end of a backward with gradient sync
    (or of `FSDPModule.finalize_backward`, or of a pipeline's step) and at each optimizer step.
    Costs a few microseconds per parameter and micro-batch, no memory and no communication; outside
    the context it costs nothing.

    Micro-batches are numbered from 0 in every iteration, in the order of the unit's forwards.

    Raises:
        GradientLostError: names the unit, the parameter, the micro-batch, and where the gradient
            was last seen; raised by ``backward()``, ``finalize_backward()`` or
            ``optimizer.step()``.
        RuntimeError: if it is already active.

    Example:
        >>> with fsdp2.testing.account_gradients():
        ...     for batch in loader:
        ...         loss_of(model, batch).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    if _accounts:
        raise RuntimeError("account_gradients() is already active")
    _accounts.append(weakref.WeakSet())
    with ExitStack() as stack:
        stack.callback(_close)
        for owner, name, around in _FOLLOWED:
            method = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _wrapped(method, around)))
        stack.callback(register_optimizer_step_pre_hook(_check_step).remove)
        yield


_accounts: list[weakref.WeakSet[Account]] = []  # one set while active


def _close() -> None:
    for account in list(_accounts.pop()):
        account.close()


def _wrapped(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(partial(method, self), self, *args, **kwargs)

    return call


# -- the path of a gradient -----------------------------------------------------------------


def _start_unshard(original: Any, unit: Unit, *args: Any) -> None:
    original(*args)
    _open(unit)


def _open(unit: Unit) -> Account | None:
    if type(unit) is not Unit:
        return None  # a unit of an estimate, which has no gradients
    account = open_account(unit)
    watch(account, unit, _made)
    _accounts[0].add(account)
    return account


def _wait_unshard(original: Any, unit: Unit, *args: Any) -> None:
    """The first call creates the unsharded parameters of tensor subclasses, which must be watched
    before the runtime counts their gradients."""
    original(*args)
    account = account_of(unit.gradients)
    if account is not None:
        watch(account, unit, _made)


def _post_forward(original: Any, runtime: Runtime, unit: Unit, **kwargs: Any) -> None:
    account, forward = account_of(unit.gradients), kwargs.get("forward")
    if account and forward and kwargs["differentiable"] and not runtime.in_backward:
        account.forward_ended(forward, len(unit.modules))
    original(unit, **kwargs)


def _skips_post_forward(original: Any, middle: Middle, *args: Any) -> bool:
    skips = original(*args)
    account = account_of(middle.unit.gradients)
    if account and skips and middle.graph:
        account.forward_skipped()
    return skips


def _pre_backward(
    original: Any, runtime: Runtime, unit: Unit, forward: Any = None, **kwargs: Any
) -> None:
    # (A unit that has stayed gathered since before the context has no account yet.)
    account = account_of(unit.gradients) or _open(unit)
    if account and not unit.backward_began:
        # (Hooks on outputs may run again in the backward for the weights.)
        first = forward is None or not forward.entered
        owes = first and kwargs.get("accumulates") is False and not runtime.ends_iteration
        shown = unit.registration.registered == "unsharded"
        account.backward_entered(forward, owes=owes, shown=shown)
    original(unit, forward, **kwargs)


def _take(original: Any, gradients: UnitGrads, **kwargs: Any) -> Any:
    account = account_of(gradients)
    if account is None:
        return original(**kwargs)
    account.observe()
    taken = original(**kwargs)
    for bucket, grads in zip(gradients._param_group.buckets, taken, strict=True):
        account.took([bucket.params[i] for i in grads])
    return taken


def _keep_as_sums(original: Any, gradients: UnitGrads) -> None:
    account = account_of(gradients)
    if account is not None:
        account.observe()
    original()
    if account is not None:
        account.kept()


def _make_reductions(original: Any, gradients: UnitGrads, *args: Any, **kwargs: Any) -> Any:
    reductions = original(*args, **kwargs)
    account = account_of(gradients)
    if account is None:
        return reductions
    for reduction in reductions:
        params = [reduction.bucket.params[i] for i in reduction.plan.present]
        vars(reduction)["_records"] = account.launched(params)
    return reductions


def _complete(original: Any, reduction: Reduction, *args: Any) -> Any:
    records = vars(reduction).get("_records", ())
    for record in records:  # an optimizer in backward may step during this
        record.attaching, record.flying = record.flying, []
    result = original(*args)
    for record in records:
        sharded = record.param.sharded
        if reduction.waits:
            record.partial += record.attaching
        else:
            record.num_reduced += len(record.attaching)
            if reduction.replicate is not None:
                record.partial.clear()
            if sharded.grad is None and not sharded._post_accumulate_grad_hooks:
                record.lose(record.attaching, "it was reduced, but not attached to the shard")
        record.attaching.clear()
    return result


def _discard(original: Any, reduction: Reduction, *args: Any) -> None:
    original(*args)
    for record in vars(reduction).get("_records", ()):
        record.forget()


def _drop(original: Any, gradients: UnitGrads) -> None:
    original()
    account = account_of(gradients)
    if account is not None:
        account.forget()


def _forget(original: Any, gradients: UnitGrads, param: ShardedParam) -> None:
    original(param)
    account = account_of(gradients)
    if account is not None and id(param) in account.records:
        account.records[id(param)].forget()


# -- checks ---------------------------------------------------------------------------------


def _made(account: Account) -> None:
    """After the first gradient of a backward, queue a check at its end, which also covers gradients
    and ends of backward for which no hook of the unit runs."""
    if account.is_queued:
        return
    account.is_queued = True
    Variable._execution_engine.queue_callback(partial(_check_noticed, weakref.ref(account)))


def _check_noticed(ref: weakref.ref[Account]) -> None:
    account = ref()
    unit = None if account is None else account.unit()
    if account is None or unit is None:
        return
    account.is_queued = False
    runtime = runtime_of(unit)
    if not unit.config.reduce_grads or runtime.held_open:
        return
    if not runtime.in_backward:
        _raise(account.problems(_UNREDUCED, all_owed=False))
    elif not runtime.will_end_backward:  # outside autograd's run
        places = (*_UNREDUCED, "flying") if runtime.ends_iteration else _UNREDUCED
        _raise(account.problems(places, all_owed=False))


def _end_backward(original: Any, runtime: Runtime) -> None:
    explicit = torch._C._current_graph_task_id() == -1  # called by a pipeline, not in backward
    original()
    accounts = [account for unit in runtime.units if (account := account_of(unit.gradients))]
    made = any(account.has_made for account in accounts)
    for account in accounts:
        account.backward_ended(made=made)
    _check(runtime, ended=runtime.ends_iteration, explicit=explicit)


def _finalize(original: Any, part: Finalization, *, wait: bool) -> Any:
    result = original(wait=wait)
    _check(part.runtime, ended=wait, explicit=True)
    return result


def _finish(original: Any, part: Finalization, *args: Any) -> None:
    original(*args)
    _check(part.runtime, ended=True, explicit=True)


def _check(runtime: Runtime, *, ended: bool, explicit: bool) -> None:
    """Check at the end of a backward or an iteration."""
    problems = []
    for unit in runtime.units:
        account, config = account_of(unit.gradients), unit.config
        if account is None:
            continue
        account.observe()
        places: list[str] = []
        waits_for_caller = runtime.held_open and config.sync_grads and not explicit
        if config.reduce_grads and not waits_for_caller:
            places += _UNREDUCED
        if ended:
            places.append("flying")
            if config.all_reduce_grads and config.reduce_grads:
                places.append("partial")
        problems += account.problems(places, all_owed=ended and explicit)
        if ended:
            account.settle()
    _raise(problems)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before an optimizer step, check that all gradients of its parameters have arrived."""
    stepped: set[int] = set()
    problems = []
    for account in list(_accounts[0]) if _accounts else ():
        account.observe()
        for record in account.records.values():
            left = record.left(PLACES)
            if left and not stepped:
                groups = optimizer.param_groups
                stepped = {id(p) for group in groups for p in group["params"]}
            if left and id(record.param.sharded) in stepped:
                name = record.param.fqn
                problems += [
                    f"parameter '{name}', {text}, but the optimizer steps now" for text in left
                ]
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if not problems:
        return
    for account in list(_accounts[0]) if _accounts else ():
        account.forget()
    shown = "\n  ".join(problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    raise GradientLostError(f"Gradients did not reach the sharded parameters:\n  {shown}{more}")


_FOLLOWED: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (Unit, "start_unshard", _start_unshard),
    (Unit, "wait_unshard", _wait_unshard),
    (Runtime, "post_forward", _post_forward),
    (Middle, "skips_post_forward", _skips_post_forward),
    (Runtime, "pre_backward", _pre_backward),
    (UnitGrads, "take", _take),
    (UnitGrads, "keep_as_sums", _keep_as_sums),
    (UnitGrads, "make_reductions", _make_reductions),
    (UnitGrads, "drop", _drop),
    (UnitGrads, "forget", _forget),
    (Reduction, "complete", _complete),
    (Reduction, "discard", _discard),
    (Runtime, "end_backward", _end_backward),
    (Finalization, "finalize", _finalize),
    (Finalization, "_finish", _finish),
)
