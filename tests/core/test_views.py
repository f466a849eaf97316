"""Units whose outputs are views, changed in place by who called them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import distributed
from models import Case, normal_batch
from reference import Training, check_training


class ReturnsView(nn.Module):
    """Its output is a view: of what it computed, or of its input."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.of_input = of_input

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.view(-1, 6), (x if self.of_input else y).view(-1, 2, 3)


class ChangesInPlace(nn.Module):
    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.units = nn.ModuleList(ReturnsView(of_input) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            y, z = unit(x)
            y += 1.0  # rewrites the history of the view
            x = y * z.flatten(1).mean(1, keepdim=True)
        return x


@pytest.mark.parametrize("of_input", [False, True])
@distributed(1, 2, 3)
def test_outputs_that_are_views_may_be_changed_in_place(of_input: bool) -> None:
    """torch warns that its hook on the output is lost; a second one here is not."""
    case = Case(
        "views",
        lambda: ChangesInPlace(of_input),
        lambda m: list(m.get_submodule("units").children()),
        normal_batch(4, 6),
    )
    assert dist.get_world_size() <= 3
    check_training(case, Training(dtype=torch.float64, steps=3))
