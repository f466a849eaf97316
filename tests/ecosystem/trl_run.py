"""One rank of a training by trl's trainers, on Accelerate's path for FSDP2: a small Llama.

    torchrun --nproc-per-node 2 trl_run.py IMPLEMENTATION FOLDER sft|dpo

Each rank writes what the trainer logged of every step.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import datasets
import tokenizers
import torch
import torch.distributed as dist
import transformers
from trainer_run import build, fsdp_on_the_cpu

from client_programs import change_imports, write

STEPS = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def tokenizer() -> Any:
    names = {name: index for index, name in enumerate(["<pad>", "<eos>", *LETTERS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="."))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>"
    )


def text(index: int, size: int) -> str:
    generator = torch.Generator().manual_seed(index)
    return "".join(LETTERS[i] for i in torch.randint(28, (size,), generator=generator))


def trainer(kind: str, arguments: dict[str, Any]) -> Any:
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        rows = [{"text": text(i, 12 + i % 5)} for i in range(64)]
        return SFTTrainer(
            build(),
            SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(i, 6), "chosen": text(100 + i, 8), "rejected": text(200 + i, 5 + i % 4)}
        for i in range(64)
    ]
    return DPOTrainer(
        build(),
        build(),
        args=DPOConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def main(implementation: str, folder: str, kind: str) -> None:
    fsdp_on_the_cpu()
    change_imports(implementation)
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
        },
    }
    run = trainer(kind, arguments)
    run.train()
    timed = ("runtime", "per_second", "flos", "num_input_tokens")
    logs = [
        {name: value for name, value in log.items() if not any(word in name for word in timed)}
        for log in run.state.log_history
    ]
    write(folder, logs, run.model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
