"""Checks that parameters can be sent under a `CommPolicy`, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from ...comm.mesh_transports import CommOptions
from ...runtime.events import TreePart, UnitPart, registry
from ...runtime.unit import Unit
from ...sharding.param import ShardedParam
from .policy import hops_of


def check_sent(unit: Unit, params: Iterable[ShardedParam], options: CommOptions) -> None:
    """Check that ``params``, of ``unit``, can be sent under ``options.policy``.

    Raises:
        ValueError: if one cannot, or if something else decides about the bytes.
    """
    policy = options.policy
    if policy is None:
        return
    others = {
        "a custom all-gather": options.all_gather,
        "a custom reduce-scatter": options.reduce_scatter,
        "memory of the process group or symmetric memory": options.memory,
    }
    for what, chosen in others.items():
        if chosen is not None:
            raise ValueError(
                f"Unit '{unit.name}' has a CommPolicy and {what}: both "
                "decide about what is sent. Choose one, or call set_comm_policy(None)"
            )
    for param in params:
        hops_of(policy, param.mesh.num_shards)
        if param.extension:
            # (Before it is sharded, the parameter is its own local tensor.)
            kind = type(getattr(param.sharded, "_local_tensor", param.sharded))
            raise ValueError(
                f"Parameter '{param.fqn}' is a {kind.__name__}, a tensor subclass "
                "that decides itself what is gathered: a CommPolicy cannot change that. Shard "
                "its module without one, or pass the parameter in ignored_params"
            )
        if param.dtype.is_complex:
            raise ValueError(
                f"Parameter '{param.fqn}' is {param.dtype}: a CommPolicy sends real numbers "
                "only. Shard its module without one, or pass the parameter in ignored_params"
            )


class _New(UnitPart):
    @override
    def before_taking(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        check_sent(unit, params, unit.config.comm_options)

    @override
    def before_materialize(self, units: Sequence[Unit]) -> None:
        for unit in units:
            check_sent(unit, unit.params, unit.config.comm_options)


class _Changed(TreePart):
    @override
    def before_planning(self, unit: Unit) -> None:
        check_sent(unit, unit.params, unit.config.comm_options)


registry.add(_New())
registry.add(_Changed)
