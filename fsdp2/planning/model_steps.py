"""All traced steps of one model: of the whole, and of the stages of its pipelines."""

from __future__ import annotations

from typing import Any

from torch import nn

from .candidates import Degrees
from .replay.setups import check_number, granularities
from .staged_steps import SplitStages, StagedSteps, TracedStage
from .trace.trace_options import TraceOptions
from .traces import (
    ALONE,
    WHOLE,
    Compiled,
    Size,
    TracedSteps,
    check_expert_ranks,
    check_tensor_ranks,
)


class ModelSteps:
    """Traces a model, and its stages, when they are first asked for; each once.

    Args:
        options: what is the same for all traces.
        split_stages: makes the stages of a pipeline, as in `predict`; None: there are none.
        shard_granularity: as in `shard_model`.
        experts, compiled: as of `TracedSteps`, and of `StagedSteps`.
        shared: further arguments of `TracedSteps` that stages have, too.

    Attributes:
        whole: the steps of the model as it is.
        staged: those of its stages; None without ``split_stages``.
        granularity: the ``shard_granularity`` of parameters by name, where it is not 1.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: TraceOptions,
        *,
        split_stages: SplitStages | None = None,
        shard_granularity: Any = None,
        experts: Any = None,
        compiled: Compiled = False,
        **shared: Any,
    ) -> None:
        self.options = options
        self.compiled = compiled
        self.split_stages = split_stages
        self.sample_input = sample_input
        self.whole = TracedSteps(
            model, sample_input, options, experts=experts, compiled=compiled, **shared
        )
        self.granularity = granularities(model, shard_granularity, self.whole.experts)
        self.staged: StagedSteps | None = None
        if split_stages is not None:
            self.staged = StagedSteps(
                model, sample_input, options, split_stages=split_stages, experts=experts, **shared
            )

    @property
    def num_traced(self) -> int:
        return self.whole.num_traced + (self.staged.num_traced if self.staged else 0)

    @property
    def stage_wraps(self) -> list[str]:
        """Labels of the choices of units that stages have."""
        return [label for label in self.whole.units if label in ("blocks", "one")] or [
            *self.whole.units
        ]

    def get(
        self,
        num_stages: int,
        mode: str,
        size: Size = WHOLE,
        degrees: Degrees = ALONE,
        compiled: Compiled | None = None,
        wrap: str | None = None,
        *,
        splits_backward: bool = False,
    ) -> list[TracedStage]:
        """The stages of a pipeline, or the model as the only one; see `TracedSteps.get`.

        Args:
            wrap: a label of units, if there are several choices.
            splits_backward: as of `StagedSteps.get`.
        """
        compiled = self.compiled if compiled is None else compiled
        if num_stages == 1:
            trace = self.whole.get(mode, size, degrees, compiled)
            units = self.whole.units_of(wrap)
            return [TracedStage(trace, units, expert_units=self.whole.expert_units)]
        assert self.staged is not None
        alone = degrees._replace(pipeline=1)
        return self.staged.get(
            num_stages, mode, size, alone, compiled is True, wrap, splits_backward
        )

    def check_degrees(self, degrees: Degrees) -> None:
        """Check the degrees of the model's own parallelisms.

        Raises:
            ValueError: for numbers less than 1, or that the model cannot be distributed over.
            TypeError: for other than ints.
        """
        check_expert_ranks(degrees.experts, self.whole)
        check_tensor_ranks(degrees.tensor, self.whole)
        check_number("context_ranks", degrees.context)
        check_number("pipeline_ranks", degrees.pipeline)

    def check_pipeline(
        self, ranks: int, *, accumulation: str | None, compiled: Compiled, setup: dict[str, Any]
    ) -> None:
        """Check what goes together with a pipeline, whatever its schedule.

        Args:
            setup: fields of `Setup` that are the same for all stages.

        Raises:
            ValueError: for what does not.
        """
        told = f"pipeline_ranks={ranks}"
        if self.staged is None:
            raise ValueError(
                f"{told} needs split_stages=: a function of the model and a number of stages that "
                "returns these, in order"
            )
        if self.options.max_saved_bytes is not None:
            raise ValueError(f"max_saved_bytes does not go together with {told}")
        for name, given, reason in (
            (
                "offload_optimizer",
                setup["offload_optimizer"] is not None,
                "it brings back state of one optimizer for one model, not yet of stages",
            ),
            (
                "max_device_bytes",
                setup["max_device_bytes"] is not None,
                "it is of one `shard_model`, and each stage has its own",
            ),
            (
                "shard_granularity",
                bool(self.granularity),
                "it goes by names of parameters, and stages have their own",
            ),
        ):
            if given:
                raise ValueError(
                    f"{name} does not go together with {told}: {reason}. Leave {name} or "
                    "pipeline_ranks out"
                )
        if not isinstance(compiled, bool):
            raise ValueError(
                f"{told}: stages have names of their own, so that compiled={compiled!r} names no "
                "modules: pass True for the blocks, or False"
            )
        if accumulation == "every":
            raise ValueError(
                f"{told}: torch's schedules do not reduce gradients in every micro-batch: pass "
                "accumulation='unsharded', or 'sharded' to sum on shards"
            )
