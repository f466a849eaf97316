"""One rank of a training by the `Trainer` of transformers as axolotl prepares it: LoRA by peft.

    torchrun --nproc-per-node 2 axolotl_run.py IMPLEMENTATION FOLDER lora

axolotl replaces what Accelerate does to shard a model: adapters become units of their own, and
whole tensors are sent from rank 0. Each rank writes losses, norms and sums of the parameters.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import peft
import torch.distributed as dist
import transformers
from trainer_run import Tokens, build, fsdp_on_the_cpu

from client_programs import change_imports, write


def main(implementation: str, folder: str, kind: str) -> None:
    fsdp_on_the_cpu()
    change_imports(implementation)
    from axolotl.monkeypatch.accelerate.fsdp2 import patch_accelerate_fsdp2

    patch_accelerate_fsdp2()
    assert kind == "lora"
    adapters = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "up_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
            "cpu_ram_efficient_loading": True,
        },
    )
    trainer = transformers.Trainer(
        model=peft.get_peft_model(build(), adapters), args=arguments, train_dataset=Tokens()
    )
    trainer.train()
    logs = trainer.state.log_history
    records: list[Any] = [[e["step"], e["loss"], e["grad_norm"]] for e in logs if "loss" in e]
    for name, value in trainer.model.named_parameters():
        records.append([name, value.full_tensor().double().sum().item()])
    write(folder, records, trainer.model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
