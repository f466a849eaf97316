"""One rank of a training by torchtitan's `Trainer`: its debug models, on CPUs, on made-up tokens.

    torchrun --nproc-per-node 4 torchtitan_run.py IMPLEMENTATION CONFIG FOLDER [OPTION=VALUE ...]

IMPLEMENTATION is "torch" or "fsdp2"; CONFIG names a model and a function of its
`config_registry` ("llama3.llama3_debugmodel"); an option is a field of the configuration
("parallelism.tensor_parallel_degree=2"). torchtitan imports ``fully_shard`` and what belongs to it
from ``torch.distributed.fsdp``: for "fsdp2" these names there are ours, which is what changing its
import lines does. Each rank writes the loss and the gradient norm of every step.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.fsdp

import fsdp2

STEPS, SEQUENCE, BATCH = 6, 64, 8
NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "fully_shard",
)


def change_imports() -> None:
    for package in (torch.distributed.fsdp, torch.distributed._composable.fsdp):
        for name in NAMES:
            setattr(package, name, getattr(fsdp2, name))


def take_the_cpu_for_a_device() -> None:
    """torchtitan asks torch which accelerator there is, and the module of that about its memory."""
    about = SimpleNamespace(name="CPU", total_memory=1 << 34)
    module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 8,
        synchronize=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: about,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: module


def sum_first() -> None:
    """Where gradients are summed, torch's FSDP2 reduces with a factor, which gloo does not do."""
    import torchtitan.distributed.fsdp as titan

    disable = titan.disable_fsdp_gradient_division

    def disable_and_sum(model: torch.nn.Module) -> None:
        disable(model)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    titan.disable_fsdp_gradient_division = disable_and_sum


def exchange_uneven_parts() -> None:
    """Tokens go to experts by an all-to-all of lists; gloo's takes parts of equal sizes only."""

    def all_to_all(outputs: list[Any], inputs: list[Any], group: Any = None) -> None:
        sizes = [len(part) for part in outputs], [len(part) for part in inputs]
        received = torch.cat(outputs)
        dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
        torch._foreach_copy_(outputs, list(received.split(sizes[0])))

    dist.all_to_all = all_to_all


class Tokens:
    """Tokens that follow from their place in the data, so that there is something to learn."""

    def __init__(self, vocabulary: int, rank: int, ranks: int) -> None:
        self.vocabulary, self.rank, self.ranks = vocabulary, rank, ranks

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            start = torch.randint(self.vocabulary, (BATCH, 1), generator=generator)
            step = torch.randint(1, 4, (BATCH, 1), generator=generator)
            row = (start + step * torch.arange(SEQUENCE + 1)) % self.vocabulary
            yield {"input": row[:, :-1].contiguous()}, row[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def configure(name: str, folder: str, options: list[str]) -> Any:
    model, function = name.split(".")
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    config = getattr(registry, function)()
    config.dump_folder = folder
    config.training.steps = STEPS
    config.training.seq_len = SEQUENCE
    config.training.local_batch_size = BATCH
    config.validator.enable = False
    config.debug.seed = 0
    config.training.disable_cuda_graphs = True
    for option in options:
        path, value = option.split("=")
        target = config
        *parents, field = path.split(".")
        for parent in parents:
            target = getattr(target, parent)
        assert field in {f.name for f in dataclasses.fields(target)}, option
        setattr(target, field, json.loads(value))
    return config


def main(implementation: str, name: str, folder: str, *options: str) -> None:
    take_the_cpu_for_a_device()
    if implementation == "fsdp2":
        change_imports()
    import torchtitan.components.tokenizer as tokenizer
    import torchtitan.hf_datasets.text_datasets as text_datasets
    import torchtitan.models.common.config_utils as config_utils
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.common.attention import ScaledDotProductAttention

    records: list[list[float]] = []
    log = MetricsProcessor.log

    def note(self: Any, step: int, avg_loss: float, max_loss: float, norm: float, **rest: Any):
        records.append([step, float(avg_loss), float(norm)])
        log(self, step, avg_loss, max_loss, norm, **rest)

    MetricsProcessor.log = note
    tokenizer.HuggingFaceTokenizer.__init__ = lambda self, *args, **kwargs: None
    vocabulary = 2000
    text_datasets.HuggingFaceTextDataLoader.__new__ = lambda cls, *args, **kwargs: Tokens(
        vocabulary, kwargs["dp_rank"], kwargs["dp_world_size"]
    )
    # Its own are FlexAttention, which has to be compiled, and kernels for GPUs.
    config_utils.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    sum_first()
    exchange_uneven_parts()
    trainer = configure(name, folder, [*options]).build()
    made_by = type(trainer.model_parts[0]).__mro__[1].__module__
    trainer.train()
    written = json.dumps({"records": records, "made_by": made_by})
    Path(folder, f"out{dist.get_rank()}.json").write_text(written)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
