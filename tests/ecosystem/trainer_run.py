"""One rank of a training by the `Trainer` of transformers, on Accelerate's path for FSDP2.

    torchrun --nproc-per-node 2 trainer_run.py IMPLEMENTATION FOLDER [CHECKPOINT]

IMPLEMENTATION is "torch" or "fsdp2". Accelerate imports ``fully_shard`` and what belongs to it from
``torch.distributed.fsdp`` where it uses them: for "fsdp2" these names there are ours, which is what
changing its import lines does. Rank 0 writes the losses and norms of every step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import transformers

import fsdp2

NAMES = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "register_fsdp_forward_method",
)
STEPS = 6
SAVED_AFTER = 3


def change_imports() -> None:
    for name in NAMES:
        setattr(torch.distributed.fsdp, name, getattr(fsdp2, name))


def fsdp_on_the_cpu() -> None:
    """Accelerate takes DDP on the CPU, whatever it is asked for."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def init_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init_with_fsdp


def build() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 61, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    implementation, folder = sys.argv[1], Path(sys.argv[2])
    checkpoint = sys.argv[3] if len(sys.argv) > 3 else None
    fsdp_on_the_cpu()
    if implementation == "fsdp2":
        change_imports()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=SAVED_AFTER,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    )
    trainer = transformers.Trainer(model=build(), args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=checkpoint)
    model = trainer.model
    made_by = {
        base.__module__.split(".")[0]
        for module in model.modules()
        for base in type(module).__mro__
        if base.__name__ == "FSDPModule"
    }
    logs = trainer.state.log_history
    records = [[e["step"], e["loss"], e["grad_norm"]] for e in logs if "loss" in e]
    if dist.get_rank() == 0:
        output = {"records": records, "made_by": sorted(made_by)}
        (folder / "out.json").write_text(json.dumps(output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
