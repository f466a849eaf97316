"""Train ResNet-18 with sharded parameters on handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/train_resnet.py --amp

The data are the 1,797 digits of 8 x 8 pixels that ship with scikit-learn; 300 are held out.
Convolutional networks have few parameters for their compute (11 million here). This tutorial shows
two features that language models lack:

*Batch normalization.* Its weights are parameters and are sharded. Its running statistics are
buffers, which `fully_shard` does not shard. Every rank normalizes with the statistics of its own
part of the batch, as under DDP, so its running statistics describe only its own examples. Training
never reads them, but evaluation does. Therefore `average_statistics` averages them over ranks
before a checkpoint or an evaluation. Moving averages are linear, so the result does not depend on
how often this is done. If a rank has few images, normalize over all ranks instead, with torch's
SyncBatchNorm: `--sync-bn` (GPUs only).

*Mixed precision by operation.* `--amp` uses `torch.autocast`: each operation casts its inputs, so
convolutions compute in bfloat16 while normalization and loss stay in float32. Parameters are
gathered, and gradients reduced, in float32. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`
casts shards before they are gathered: half the bytes are sent and held, and every operation of the
unit runs in bfloat16, including normalization. Use the policy for transformers. For networks whose
normalization needs float32, use autocast, or both with separate units for the norms.
On GPUs, `--amp` uses float16 with a `GradScaler`, because float16 gradients can underflow.
"""

from __future__ import annotations

from common.training import Run, parse, say, training_parser  # isort: skip (takes Ctrl-C)

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.family_data import Batches, Digits, neighbour_accuracy, read_digits
from common.options import fail, positive
from common.processes import start_processes
from fsdp2 import shard_model


class Residual(nn.Module):
    """Two 3 x 3 convolutions with a skip connection (He et al., arXiv 1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut.append(nn.Conv2d(channels_in, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks; maps images (n, 1, 8, 8) to logits of 10 classes.

    The first layer suits small images: 3 x 3 without stride and pooling, instead of 7 x 7.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential()
        channels = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                self.blocks.append(Residual(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def main() -> None:
    parser = training_parser(__doc__, out="resnet", steps=80, batch=128, lr=1e-3)
    parser.add_argument(
        "--width", type=positive, default=64, metavar="N", help="channels of the first stage"
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision by torch.autocast")
    parser.add_argument("--sync-bn", action="store_true", help="normalize over all ranks (GPUs)")
    options = parse(parser)
    if options.sync_bn and not torch.cuda.is_available():
        fail("--sync-bn: torch's SyncBatchNorm runs on GPUs only")
    device = start_processes()

    digits = read_digits()
    model = build_model(options, device)
    # After sharding, so that the optimizer's state is sharded like the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, fused=True)
    amp_dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and amp_dtype is torch.float16)

    def before_save() -> dict[str, object]:
        average_statistics(model)
        return {"scaler": scaler.state_dict()}

    run = Run(options, device, model, optimizer, unit="images", extra=before_save)
    if "scaler" in run.loaded:
        scaler.load_state_dict(run.loaded["scaler"])
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(
        len(digits.train), options.batch, rank=rank, num_ranks=num_ranks, seed=options.seed
    )
    for step in run.steps():
        own = batches.at(step)
        images, labels = shifted(digits.train[own], options.seed, step), digits.train_labels[own]
        # Around forward and loss only: backward uses the same dtypes as forward.
        with torch.autocast(device.type, dtype=amp_dtype, enabled=options.amp):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        scaler.scale(loss).backward()
        # All ranks skip the step if any of them found an overflow in its shards.
        scaler.step(optimizer)
        scaler.update()
        run.record(loss)
        optimizer.zero_grad()

    if not run.interrupted:
        average_statistics(model)
        accuracy = held_out_accuracy(model, digits, device)
        neighbour = neighbour_accuracy(digits)
        say(
            f"held out     accuracy {accuracy:.1%} on {len(digits.held_out)} images; the nearest "
            f"neighbour: {neighbour:.1%}"
        )
        run.report(accuracy=accuracy, neighbour_accuracy=neighbour)
    dist.destroy_process_group()


def build_model(options: argparse.Namespace, device: torch.device) -> ResNet18:
    """Create the sharded model: each residual block is a unit; stem and head belong to the root.

    The model is small, so every rank creates all of it, with the same weights, and keeps its
    shards.
    """
    torch.manual_seed(options.seed)
    model = ResNet18(options.width).to(device)
    if options.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return shard_model(model, strategy=options.strategy, wrap=Residual)


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Average the running statistics of batch normalization over ranks, in one all-reduce."""
    running = [b for b in model.buffers() if b.is_floating_point()]  # not the counts of batches
    flat = torch.cat([b.flatten() for b in running])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(running, flat.split([b.numel() for b in running]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def shifted(images: Tensor, seed: int, step: int) -> Tensor:
    """The images, shifted by up to a pixel, because there are few digits."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    right, down = torch.randint(-1, 2, (2,), generator=generator).tolist()
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)  # the background
    return padded[..., 1 + down : 9 + down, 1 + right : 9 + right]


@torch.no_grad()
def held_out_accuracy(model: nn.Module, digits: Digits, device: torch.device) -> float:
    """Accuracy on all held-out images. A forward is collective, so every rank runs all of them.

    The evaluation uses float32 and running statistics, so the batch size does not matter.
    """
    model.eval()
    guesses = torch.cat([model(part.to(device)).argmax(1) for part in digits.held_out.split(100)])
    model.train()
    return float((guesses.cpu() == digits.held_out_labels).float().mean())


if __name__ == "__main__":
    main()
