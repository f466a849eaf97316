"""Eight models as users have them, from torchvision, transformers, peft, and of our own.

No dropout, so that every variant of a model has the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import FAMILIES, ExpertBlock
from .models import LM, Block, LMConfig


@dataclass(frozen=True)
class Entry:
    """A model, how it is trained, and what becomes a unit.

    Attributes:
        model: makes it.
        batch: makes the arguments of forward, with the random generator of the moment.
        loss: of the model's output.
        units: returns the classes of the modules that are units; the rest is the root unit.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    units: Callable[[], tuple[type[nn.Module], ...]]


class UNetLevel(nn.Module):
    """Two convolutions with group norms."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Down and up over some levels, with connections across (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 32, num_levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels)]
        ins = [3, *widths[:-1]]
        self.down = nn.ModuleList(UNetLevel(a, b) for a, b in zip(ins, widths, strict=True))
        self.up = nn.ModuleList(UNetLevel(low + high, high) for high, low in pairwise(widths))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = images, []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for block, across in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), across], dim=1))
        return self.head(x)


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    # Blocks begin as identities (Goyal et al., 2017, section 5.1). Otherwise sums in another order,
    # which differ by 1e-6 on three ranks, make losses differ by 1e-2 two steps later.
    return resnet50(num_classes=100, zero_init_residual=True)


def _vit_b_16() -> nn.Module:
    from torchvision.models import vit_b_16

    return vit_b_16(image_size=64, num_classes=100)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8000, hidden_size=384, num_hidden_layers=8, num_attention_heads=6,
        intermediate_size=1536, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = LM(LMConfig(vocab=4096, width=384, hidden=1024, num_blocks=8, num_heads=6))
    config = LoraConfig(r=8, target_modules=["wq", "wk", "wv", "wo"], lora_dropout=0.0)
    return get_peft_model(model, config)


def _bottleneck() -> tuple[type[nn.Module], ...]:
    from torchvision.models.resnet import Bottleneck

    return (Bottleneck,)


def _encoder_block() -> tuple[type[nn.Module], ...]:
    from torchvision.models.vision_transformer import EncoderBlock

    return (EncoderBlock,)


def _bert_layer() -> tuple[type[nn.Module], ...]:
    from transformers.models.bert.modeling_bert import BertLayer

    return (BertLayer,)


def _images(number: int, size: int) -> tuple[Tensor]:
    return (torch.randn(number, 3, size, size),)


def _tokens(vocab: int, batch: int, length: int) -> tuple[Tensor]:
    return (torch.randint(vocab, (batch, length)),)


def _class_loss(output: Any) -> Tensor:
    """Cross-entropy of logits (..., classes) for classes that look random."""
    logits = (output if isinstance(output, Tensor) else output.logits).flatten(0, -2)
    targets = torch.arange(len(logits)) * 7919 % logits.shape[-1]
    return F.cross_entropy(logits.float(), targets)


_EXPERTS, _RECURRENT, _RECOMMENDER = (
    FAMILIES[name] for name in ("experts", "recurrent", "recommender")
)
ENTRIES = {
    "ResNet-50": Entry(_resnet50, lambda: _images(4, 48), _class_loss, _bottleneck),
    "ViT-B/16": Entry(_vit_b_16, lambda: _images(2, 64), _class_loss, _encoder_block),
    "BERT": Entry(_bert, lambda: _tokens(8000, 2, 48), _class_loss, _bert_layer),
    "experts": Entry(_EXPERTS.model, _EXPERTS.batch, _class_loss, lambda: (ExpertBlock,)),
    "LoRA": Entry(_lora, lambda: _tokens(4096, 2, 64), _class_loss, lambda: (Block,)),
    "U-Net": Entry(
        UNet,
        lambda: _images(2, 32),
        lambda out: out.float().square().mean(),
        lambda: (UNetLevel,),
    ),
    "recommender": Entry(
        _RECOMMENDER.model, _RECOMMENDER.batch, _RECOMMENDER.loss, lambda: (nn.Embedding,)
    ),
    "LSTM": Entry(_RECURRENT.model, _RECURRENT.batch, _class_loss, lambda: (nn.LSTM,)),
}
