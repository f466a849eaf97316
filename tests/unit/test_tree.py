"""Finding and replacing tensors in the arguments and results of forward."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from fsdp2.common.pytree import cast_floating, map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    loss: torch.Tensor
    extra: object = None


@dataclass(frozen=True)
class FrozenOutput:
    value: torch.Tensor


class Record(OrderedDict):
    """A dict that is more than its items, as the outputs of some model libraries are."""


def test_tensors_are_found_in_every_container() -> None:
    a, b, c, d, e = (torch.tensor(float(i)) for i in range(5))
    tree = {"x": [a, (b, Pair(c, None))], "y": Output(d, FrozenOutput(e)), "z": 3}
    assert [t.item() for t in tensors_in(tree)] == [0, 1, 2, 3, 4]


def test_types_of_containers_are_kept() -> None:
    record = Record(x=torch.ones(1))
    record.note = "kept"
    tree = [record, Pair(torch.ones(1), 2), Output(torch.ones(1)), FrozenOutput(torch.ones(1))]
    mapped = map_tensors(lambda t: t + 1, tree)
    assert type(mapped[0]) is Record
    assert mapped[0].note == "kept"
    assert type(mapped[1]) is Pair
    assert all(t.item() == 2 for t in tensors_in(mapped))
    assert all(t.item() == 1 for t in tensors_in(tree)), "the original is untouched"


def test_unchanged_containers_are_the_same_objects() -> None:
    tree = {"ids": torch.ones(2, dtype=torch.int64), "rest": (1, [torch.ones(1)])}
    assert map_tensors(cast_floating(torch.float32), tree) is tree
    cast = map_tensors(cast_floating(torch.float64), tree)
    assert cast["ids"] is tree["ids"]
    assert cast["rest"][1][0].dtype == torch.float64
