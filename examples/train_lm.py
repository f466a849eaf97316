"""Train a language model with fully sharded data parallelism.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

This tutorial trains a byte-level Llama-like model on the source of Python's standard library, or on
the text of `--data PATH`. Every rank holds only its shards of the parameters, the gradients and the
optimizer's state. The same command trains on GPUs over NCCL if there are any, otherwise on the CPU
over gloo. `--help` lists the options. With `--elastic`, the run continues automatically when a
process or host dies, hangs or joins (docs/faults.md):

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 examples/train_lm.py --elastic --save-every 20

Read `main` from top to bottom; the functions follow in the order of their use. The files in
`common/` hold code that every training script needs: `options.py` (command line), `lm_model.py`
(the model, plain PyTorch), `text_data.py` (text and n-gram models), `processes.py` (the process
group), `elastic.py` (resuming from memory or from checkpoints), `lm_report.py` (progress, figures).
"""

from __future__ import annotations

from common.interrupt import stop_requested  # isort: skip (before torch: it takes Ctrl-C)

import argparse
import math
import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from common.elastic import Commits, Snapshots, Start, resume, watched
from common.lm_model import LanguageModel, ModelConfig, init_std
from common.lm_report import (
    LossLog,
    Numbers,
    Progress,
    memory_in_use,
    print_start,
    report,
    sent_bytes,
    show_profile,
)
from common.options import checkpoint_path, fail, options_to_save, parse_options
from common.processes import set_earlier_run_aside, start_processes
from common.text_data import Batches, Text, read_text, validation_starts, windows_at
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    profile,
)
from fsdp2.graph import CompiledStep, compile_step


def main() -> None:
    options = parse_options()
    device = start_processes(timeout_s=4 * options.hang_after if options.elastic else None)
    if not (options.resume or options.elastic):
        set_earlier_run_aside(options.out)
    text, batches = open_text(options)
    model = build_model(options, device)
    # After sharding, so that the optimizer's state is sharded like the parameters.
    optimizer = build_optimizer(model, options)
    run = Run(options, Path(options.out), device, Numbers(), text, batches, model, optimizer)
    if options.graph:
        # The first step traces and compiles, for about a minute. Validation and the sample run
        # eagerly.
        run.graph = compile_step(model, weighted_loss)

    with watched(options, model):
        step = train(run)
    if run.numbers.of_all_ranks(stop_requested()).any():
        if dist.get_rank() == 0:
            where = f"; --resume continues from {checkpoint_path(run.out, step)}" if step else ""
            print(f"stopped after step {step}{where}", flush=True)
    else:
        forwards = run.batches.forwards
        sent = sent_bytes(model, forwards, reductions=forwards if run.graph else 1)
        bits = validation_bits(run)
        sample = sample_text(run, b"def ")
        report(
            run.out, model, optimizer, text, options, run.numbers, step=step, sent=sent,
            bits=bits, sample=sample,
        )  # fmt: skip
    dist.destroy_process_group()


@dataclass
class Run:
    """The parts of a training run."""

    options: argparse.Namespace
    out: Path
    device: torch.device
    numbers: Numbers
    text: Text
    batches: Batches
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    graph: CompiledStep | None = None


def open_text(options: argparse.Namespace) -> tuple[Text, Batches]:
    """The text, and this rank's part of its batches. Every rank reads the whole text."""
    try:
        text = read_text(None if options.data is None else Path(options.data))
        batches = Batches(
            text.train,
            length=options.length,
            batch=options.batch,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            seed=options.seed,
        )
    except (OSError, ValueError) as error:
        fail(f"--data: {error}")
    return text, batches


def build_model(options: argparse.Namespace, device: torch.device) -> LanguageModel:
    """Create the sharded model.

    The model is created on the meta device, without memory. Then it is sharded, and only then do
    the shards get memory and values, so no rank ever holds the whole model.
    """
    config = ModelConfig(
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden=options.hidden,
        recompute=options.ac,
    )
    with torch.device("meta"):
        model = LanguageModel(config)
    shard(model, options, device)
    model.to_empty(device="cpu" if options.offload else device)
    init_weights(model, config, options.seed)
    return model


def shard(model: LanguageModel, options: argparse.Namespace, device: torch.device) -> None:
    """Shard every block, and then the root with the rest: embedding, last norm and head.

    Each call makes one unit. Its parameters are gathered together before its forward, freed after
    it, and gathered again for backward. Its gradients are reduced together. While one block
    computes, the parameters of the next one are gathered.
    """
    world_size = dist.get_world_size()
    if options.replicate == 1:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    else:
        # HSDP: shard within a group of ranks, replicate across the groups.
        shape = (options.replicate, world_size // options.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy()
    if options.bf16:
        # Shards and optimizer stay in float32; the gathered copies are bfloat16.
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if options.offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


@torch.no_grad()
def init_weights(model: LanguageModel, config: ModelConfig, seed: int) -> None:
    """Initialize the parameters to values that do not depend on the number of ranks.

    Each parameter has its own generator, seeded with its name. Every rank draws one whole parameter
    at a time and keeps its own rows. This needs no communication, and the model is the same on 1
    rank, on 8, and with replicas.
    """
    for name, parameter in model.named_parameters():
        std = init_std(name, config)
        if std is None:
            full = torch.ones(parameter.shape)
        else:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            full = torch.normal(0.0, std, parameter.shape, generator=generator)
        assert isinstance(parameter, DTensor)
        own = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(own.to_local())


def build_optimizer(model: LanguageModel, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW, with weight decay on the matrices."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(0.9, 0.95),
        fused=True,
    )


def train(run: Run) -> int:
    """The training loop; returns the last step. The run was saved after it."""
    options, model, optimizer = run.options, run.model, run.optimizer
    start = Start()
    # Every rank writes its shards to ordinary safetensors files. It can read its shards from files
    # that any number of ranks wrote.
    commits = Commits(options.out, elastic=options.elastic)
    snapshots = Snapshots(options, run.numbers)
    if options.resume or options.elastic:
        start = resume(options, commits, snapshots, model, optimizer)
    first_step, run.batches.position = start.step, start.position
    print_start(run.out, model, run.text, first_step=first_step, device=run.device)
    log = LossLog(run.out, first_step=first_step, unwritten=start.losses)
    last_step = min(options.steps, options.stop_at or options.steps)
    tokens = sequences_per_step(options) * options.length
    progress = Progress(first_step=first_step, last_step=last_step, units_per_step=tokens)
    end_time = time.monotonic() + 60 * (options.minutes or math.inf)

    # By the fourth step, storages are planned and the order of the units is known.
    profiled_step = min(first_step + 4, last_step) if options.profile else None
    profiled = profile(model)

    def state_now() -> dict[str, Any]:
        extra = run_state(run) | {"unwritten": start.unwritten(log)}
        return {"model": model, "optimizer": optimizer, "extra": extra}

    def commit() -> None:
        start.check_newest()
        commits.save(step, **state_now())

    step, stop = first_step, bool(run.numbers.of_all_ranks(stop_requested()).any())
    committed = start.committed
    while step < last_step and not stop:
        step += 1
        learning_rate = learning_rate_at(step, options)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        with profiled if step == profiled_step else nullcontext():
            loss, grad_norm = train_step(run)

        # All ranks share the mean loss, the largest memory, and whether to stop: they must stop
        # after the same step.
        stop = stop_requested() or time.monotonic() > end_time
        ranks = run.numbers.of_all_ranks(loss, memory_in_use(run.device), stop, commits.failed)
        loss, stop = float(ranks[:, 0].mean()), bool(ranks[:, 2].any())
        if ranks[:, 3].any():
            commits.start_over()
        log.write(
            step,
            loss=loss,
            bits_per_byte=loss / math.log(2),
            learning_rate=learning_rate,
            grad_norm=grad_norm,
        )
        progress.update(step, loss=loss, memory_bytes=float(ranks[:, 1].max()))
        committed = bool(options.save_every) and step % options.save_every == 0
        if committed:
            commit()
        snapshots.after_step(step, **state_now())
    # Even if there was no step: the restored state may be in memory only, which ends with this run.
    if step and not committed:
        commit()
    commits.close()
    snapshots.close(keep=commits.failed)
    progress.close()
    log.close()
    if profiled_step is not None and first_step < profiled_step <= step:
        show_profile(profiled, Path(options.profile))
    return step


def train_step(run: Run) -> tuple[float, float]:
    """One optimizer step; returns this rank's loss and the norm of all gradients."""
    loss = forward_backward(run)
    grad_norm = float(clip_grad_norm_(run.model.parameters(), max_norm=1.0))
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss, grad_norm


def learning_rate_at(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    warmup = min(options.warmup, options.steps)
    if step <= warmup:
        return options.lr * step / warmup
    done = (step - warmup) / (options.steps - warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def sequences_per_step(options: argparse.Namespace) -> int:
    """Sequences of all ranks together. In an elastic run, it does not depend on their number."""
    if options.elastic:
        return options.global_batch
    return options.accumulate * options.batch * dist.get_world_size()


def forward_backward(run: Run) -> float:
    """Accumulate the gradients of one step; returns this rank's part of the mean loss.

    The mean over ranks of these parts, in nats per byte, is the mean over all sequences of the
    step.
    """
    model = run.model
    assert isinstance(model, FSDPModule)  # `fully_shard` has added this class to the model's class
    total = torch.zeros((), device=run.device)
    micro_batches = run.batches.of_step(sequences_per_step(run.options))
    for i, part in enumerate(micro_batches):
        batch = part.inputs.to(run.device), part.targets.to(run.device)
        weight = torch.full((), part.weight, device=run.device)
        # Until the last micro-batch, gradients accumulate on each rank and are not reduced. A graph
        # always reduces them.
        is_last = i == len(micro_batches) - 1
        model.set_requires_gradient_sync(is_last or run.graph is not None)
        if run.graph is not None:
            total += run.graph(*batch, weight)
        else:
            loss = weighted_loss(model, *batch, weight)
            loss.backward()
            total += loss.detach()
    return float(total)


def weighted_loss(model: nn.Module, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """A micro-batch's part of the mean loss of a step. `--graph` captures this function."""
    return next_byte_loss(model, inputs, targets) * weight


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def run_state(run: Run) -> dict[str, Any]:
    """State that a resumed run needs in addition to its tensors."""
    return {
        "position": run.batches.position,
        "options": options_to_save(run.options),
        "world_size": dist.get_world_size(),
    }


@torch.no_grad()
def validation_bits(run: Run) -> float:
    """Bits per byte on held-out windows. Each rank takes its part of them.

    A forward is collective, so every rank must run the same number of forwards. Ranks that run out
    of windows take window 0 again and do not count it.
    """
    options, held_out = run.options, run.text.held_out
    starts = validation_starts(held_out, options.length, options.eval_bytes)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss_sum = 0.0
    for first in range(0, len(starts), options.batch * world_size):
        begin = first + rank * options.batch
        mine = starts[begin : begin + options.batch]
        inputs, targets = windows_at(held_out, mine or starts[:1], options.length)
        loss = next_byte_loss(run.model, inputs.to(run.device), targets.to(run.device))
        loss_sum += float(loss) * len(mine) * options.length
    total = run.numbers.of_all_ranks(loss_sum).sum()
    return float(total) / (len(starts) * options.length) / math.log(2)


@torch.no_grad()
def sample_text(run: Run, prompt: bytes) -> str:
    """Let the model continue `prompt`.

    All ranks take part, because each forward gathers parameters from all of them. They use the same
    context and the same random numbers. The parameters are gathered once and kept for the whole
    sample.
    """
    model, options = run.model, run.options
    assert isinstance(model, FSDPModule)
    generator = torch.Generator().manual_seed(options.seed)
    model.set_reshard_after_forward(False)
    content = list(prompt)
    for _ in range(options.sample_bytes):
        context = torch.tensor([content[-options.length :]], device=run.device)
        logits = model(context)[0, -1].float().cpu()
        probability = torch.softmax(logits / 0.8, dim=0)
        content.append(int(torch.multinomial(probability, 1, generator=generator)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    written = bytes(content).decode(errors="replace")
    # An untrained model writes control characters, which a terminal would interpret.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in written)


if __name__ == "__main__":
    main()
