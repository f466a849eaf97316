"""Days and cost of a training run over a number of tokens, from predictions of many clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..common.suggestions import did_you_mean
from ..render.text import plural, table
from ..render.timeline import pyplot_for_files, write
from .prediction import Prediction, Sweep

_DAY_S = 86400.0


@dataclass(frozen=True)
class Offer:
    """A configuration that fits, with the days and the cost of the training run.

    Attributes:
        prediction: the prediction of a step.
        days: duration of the run.
        gpu_hours: GPU hours of all GPUs together.
        cost: cost in the currency of the prices.
        batch_tokens: tokens of all ranks in a step.
        efficiency: FLOP/s, including recomputation, as a fraction of the data sheet's value for the
            dtype of computation (hardware FLOPs utilization).
        best: no other offer is both sooner and cheaper.
    """

    prediction: Prediction
    days: float
    gpu_hours: float
    cost: float
    batch_tokens: int
    efficiency: float
    best: bool = False


def _by_days(offer: Offer) -> tuple[float, float]:
    return offer.days, offer.cost


def _by_cost(offer: Offer) -> tuple[float, float]:
    return offer.cost, offer.days


@dataclass(frozen=True)
class TrainingCost:
    """The result of `training_cost`; ``print`` shows a table.

    Attributes:
        offers: ordered by hardware (as in the predictions), then by number of GPUs and cost.
        tokens, goodput: as given.
        left_out: number of predictions that do not fit, or whose batch is too large.
    """

    offers: list[Offer]
    tokens: float
    goodput: float
    left_out: dict[str, int]

    @property
    def cheapest(self) -> Offer:
        """The offer with the lowest cost; among equals, the soonest."""
        return min(self.offers, key=_by_cost)

    @property
    def fastest(self) -> Offer:
        """The offer that is done first; among equals, the cheapest."""
        return min(self.offers, key=_by_days)

    def within(self, *, days: float | None = None, cost: float | None = None) -> Offer | None:
        """The cheapest offer within ``days``, or the fastest one within ``cost``.

        Args:
            days: limit on days.
            cost: limit on cost. With both limits, the cheapest offer within them.

        Returns:
            The offer; None if there is none.
        """
        most_days, most_cost = (inf if most is None else most for most in (days, cost))
        kept = [o for o in self.offers if o.days <= most_days and o.cost <= most_cost]
        soonest_first = days is None and cost is not None
        return min(kept, key=_by_days if soonest_first else _by_cost, default=None)

    def best_number(self, extra_cost: float = 0.1) -> Offer:
        """The soonest offer among those that cost at most ``extra_cost`` more than the cheapest.

        More GPUs finish sooner, but cost more because communication takes a larger part of the
        time.

        Args:
            extra_cost: as a fraction of the lowest cost.
        """
        limit = self.cheapest.cost * (1 + extra_cost)
        return min((offer for offer in self.offers if offer.cost <= limit), key=_by_days)

    def picture(self, path: str | Path) -> None:
        """Draw days and cost over the number of GPUs to a file.

        Raises:
            ImportError: without matplotlib (``pip install fsdp2[plots]``).
        """
        lines: dict[str, dict[int, Point]] = {}
        for offer in self.offers:  # of a number of GPUs, the cheapest comes first
            made = offer.prediction
            point = (made.num_ranks, offer.days, offer.cost)
            lines.setdefault(made.hardware.name, {}).setdefault(made.num_ranks, point)
        title = f"Training to {_short(self.tokens)} tokens"
        _draw({k: list(v.values()) for k, v in lines.items()}, Path(path), title=title)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON-compatible data."""
        return {
            "tokens": self.tokens,
            "goodput": self.goodput,
            "left_out": self.left_out,
            "offers": [
                {n: v for n, v in vars(offer).items() if n != "prediction"}
                | {"prediction": offer.prediction.to_dict()}
                for offer in self.offers
            ],
        }

    @override
    def __str__(self) -> str:
        columns = _columns(offer.prediction for offer in self.offers)
        rows: list[tuple[str, ...]] = [
            ("Hardware", "GPUs", *map(_title, columns), *_HEADER),
            *(_row(offer, columns) for offer in self.offers),
        ]
        right = [str(i) for i in range(len(rows[0]) - 1) if i]
        number = self.best_number()
        lines = [
            f"{_short(self.tokens)} tokens"
            + (f", {self.goodput:.0%} of the time in steps" if self.goodput != 1 else ""),
            table(rows, right=right, indent=0),
            "*: no other is both sooner and cheaper",
            f"Cheapest: {_told(self.cheapest)}",
            f"Soonest for at most 10 % more than that: {_told(number)}",
            f"Soonest: {_told(self.fastest)}",
        ]
        lines += [f"Left out: {plural(num, 'configuration')} {why}" for why, num in
                  self.left_out.items() if num]  # fmt: skip
        return "\n".join(lines)


def training_cost(
    predictions: Sweep | Iterable[Prediction | Sweep],
    tokens: float,
    price_per_gpu_hour: float | Mapping[str, float],
    *,
    goodput: float = 1.0,
    max_batch_tokens: float | None = None,
) -> TrainingCost:
    """Compute the days and the cost of a training run over a number of tokens.

    Args:
        predictions: results of `sweep` or `predict`, for one or several types of GPUs.
        tokens: number of tokens in the run.
        price_per_gpu_hour: the price in any currency, or the prices by name of the `Hardware`.
        goodput: the fraction of the time that is spent in steps. Checkpoints, faults and repeated
            work take the rest.
        max_batch_tokens: configurations with more tokens in a step are left out. Beyond the
            critical batch size (arXiv 1812.06162), larger batches learn less from the same tokens.

    Returns:
        The table of offers.

    Raises:
        ValueError: for numbers that are not positive, if no configuration is left, and for
            predictions whose sample input has no tokens.
        KeyError: if a type of GPU has no price.

    Example:
        >>> workload, over = Workload(model, tokens, loss_fn=loss), {"num_ranks": [64, 256]}
        >>> table = sweep(workload, Sharding(mp_policy=bf16), Cluster("h100", 64), over)
        >>> made = training_cost(table, tokens=1e12, price_per_gpu_hour=2.5)
        >>> print(made)
        >>> made.within(days=30)
    """
    _check("tokens", tokens)
    _check("goodput", goodput)
    if goodput > 1:
        raise ValueError(f"goodput is a part of the time, at most 1, got {goodput}")
    if max_batch_tokens is not None:
        _check("max_batch_tokens", max_batch_tokens)
    found = _all_of(predictions)
    prices = _prices(found, price_per_gpu_hour)
    left_out = {"do not fit into memory": 0, "have more than max_batch_tokens": 0}
    offers: list[Offer] = []
    for made in found:
        if not made.tokens_per_s:
            raise ValueError(
                "The sample input has no tokens to count: time to a number of tokens needs a "
                "sample input of integers, (samples, positions)"
            )
        offer = _offer(made, tokens, prices[made.hardware.name], goodput)
        if not made.fits:
            left_out["do not fit into memory"] += 1
        elif max_batch_tokens is not None and offer.batch_tokens > max_batch_tokens:
            left_out["have more than max_batch_tokens"] += 1
        else:
            offers.append(offer)
    if not offers:
        why = "; ".join(f"{num} {why}" for why, num in left_out.items() if num)
        raise ValueError(f"No configuration is left: {why or 'there are no predictions'}")
    order = {name: i for i, name in enumerate(prices)}
    offers.sort(key=lambda o: (order[o.prediction.hardware.name], o.prediction.num_ranks, o.cost))
    return TrainingCost(_marked(offers), tokens, goodput, left_out)


def _all_of(predictions: Sweep | Iterable[Prediction | Sweep]) -> list[Prediction]:
    found: list[Prediction] = []
    for each in [predictions] if isinstance(predictions, Sweep) else predictions:
        if isinstance(each, Sweep):
            found += each.predictions
        elif isinstance(each, Prediction):
            found.append(each)
        else:
            raise TypeError(f"training_cost takes what predict or sweep returned, got {each!r}")
    return found


def _prices(found: list[Prediction], given: float | Mapping[str, float]) -> dict[str, float]:
    names = list(dict.fromkeys(made.hardware.name for made in found))
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    for name in names:
        if name not in given:
            raise KeyError(
                f"price_per_gpu_hour has no price of '{name}'{did_you_mean(name, given)}"
            )
        _check(f"price_per_gpu_hour of '{name}'", given[name])
    return {name: given[name] for name in names}


def _check(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _offer(made: Prediction, tokens: float, price: float, goodput: float) -> Offer:
    assert made.tokens_per_s is not None
    seconds = tokens / made.tokens_per_s / goodput
    hours = seconds / 3600 * made.num_ranks
    return Offer(
        made,
        seconds / _DAY_S,
        hours,
        hours * price,
        round(made.tokens_per_s * made.seconds),
        made.flops_per_s / _peak_flops(made),
    )


def _peak_flops(made: Prediction) -> float:
    """The data sheet's FLOP/s for the dtype of computation."""
    return made.hardware.matmul_flops[made.hardware.rate_of(made.dtype)]


def _marked(offers: list[Offer]) -> list[Offer]:
    """The offers; those that no other one beats in both days and cost are marked as best."""
    marked = []
    for offer in offers:
        beaten = any(
            o.days <= offer.days and o.cost <= offer.cost
            and (o.days < offer.days or o.cost < offer.cost)
            for o in offers
        )  # fmt: skip
        marked.append(Offer(**{**vars(offer), "best": not beaten}))
    return marked


# -- as text -------------------------------------------------------------------------------------

_HEADER = ("Batch", "Tokens/s", "of peak", "Days", "GPU hours", "Cost", "")


def _columns(predictions: Iterable[Prediction]) -> list[str]:
    """The choices in which the predictions differ."""
    found: dict[str, set[str]] = {}
    for made in predictions:
        for name, value in {**made.choices, "context": made.context}.items():
            found.setdefault(name, set()).add(str(value))
    return [name for name, values in found.items() if len(values) > 1]


def _row(offer: Offer, columns: Iterable[str]) -> tuple[str, ...]:
    made = offer.prediction
    choices = {**made.choices, "context": made.context}
    assert made.tokens_per_s is not None
    return (
        made.hardware.name,
        str(made.num_ranks),
        *(str(choices.get(name, "-")) for name in columns),
        _short(offer.batch_tokens),
        f"{made.tokens_per_s:,.0f}",
        f"{offer.efficiency:.0%}",
        f"{offer.days:,.1f}",
        f"{offer.gpu_hours:,.0f}",
        f"{offer.cost:,.0f}",
        "*" if offer.best else "",
    )


def _told(offer: Offer) -> str:
    made = offer.prediction
    return f"{made.num_ranks} {made.hardware.name}: {offer.days:,.1f} days, {offer.cost:,.0f}"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _short(num: float) -> str:
    """A number of tokens with the usual suffix: ``1.5T``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num >= limit:
            return f"{num / limit:.3g}{suffix}"
    return f"{num:.3g}"


Point = tuple[int, float, float]  # GPUs, days, cost


def _draw(lines: Mapping[str, Sequence[Point]], path: Path, *, title: str) -> None:
    """Draw one line for each type of GPU to ``path``; the suffix selects the format.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[plots]``).
    """
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5))
    for name, points in lines.items():
        ranks, days, costs = zip(*points, strict=True)
        axes[0].plot(ranks, days, marker="o", label=name)
        axes[1].plot(ranks, costs, marker="o", label=name)
    for axis, what in zip(axes, ("Days", "Cost"), strict=True):
        axis.set_title(what, loc="left")
        axis.set_xlabel("GPUs")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    axes[1].set_ylim(bottom=0)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    write(figure, path)
