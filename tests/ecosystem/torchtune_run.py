"""One rank of a training by a recipe of torchtune: a small Llama on made-up tokens.

    torchrun --nproc-per-node 2 torchtune_run.py IMPLEMENTATION FOLDER full|lora

Each rank writes the loss and the gradient norm of every step, and a sum over what the recipe saved.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from client_programs import change_imports, write

SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "intermediate_dim": 24,
    "max_seq_len": 16,
}
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}
records: list[list[float]] = []


def newer_torchao() -> None:
    """torchtune 0.6 is for an earlier torchao: NF4 has moved, quantizers have other names."""
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    sys.modules["torchao.dtypes.nf4tensor"] = nf4_tensor
    quantization = ModuleType("torchtune.training.quantization")
    quantization.get_quantizer_mode = lambda quantizer: None  # type: ignore[attr-defined]
    sys.modules[quantization.__name__] = quantization


class Tokenizer:
    pad_id = 0


class Tokens(torch.utils.data.Dataset):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = torch.randint(64, (32, 9), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.tokens[index].tolist()
        return {"tokens": row, "labels": row}


class Log:
    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, values: dict[str, Any], step: int) -> None:
        records.append([step, float(values["loss"]), float(values["grad_norm"])])

    def close(self) -> None:
        pass


def configure(kind: str, folder: str) -> dict[str, Any]:
    builder = "lora_llama3" if kind == "lora" else "llama3"
    model = {"_component_": f"torchtune.models.llama3.{builder}", **SIZES}
    return {
        "output_dir": folder,
        "model": model | LORA if kind == "lora" else model,
        "tokenizer": {"_component_": "__main__.Tokenizer"},
        "dataset": {"_component_": "__main__.Tokens"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": f"{folder}/start",
            "checkpoint_files": ["weights.pt"],
            "output_dir": f"{folder}/saved",
            "model_type": "LLAMA3",
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "metric_logger": {"_component_": "__main__.Log"},
        "resume_from_checkpoint": False,
        "enable_activation_checkpointing": True,
        "log_peak_memory_stats": False,
        "gradient_accumulation_steps": 2,
        "clip_grad_norm": 0.5,
        "custom_sharded_layers": ["tok_embeddings", "output"],
        "batch_size": 2,
        "shuffle": True,
        "seed": 0,
        "epochs": 2,
        "max_steps_per_epoch": 3,
        "dtype": "fp32",
        "device": "cpu",
    }


def load(recipe: str) -> Any:
    """The recipes are files that the package installs, not modules of it."""
    file = metadata.distribution("torchtune").locate_file(f"recipes/{recipe}.py")
    spec = importlib.util.spec_from_file_location(recipe, str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(implementation: str, folder: str, kind: str) -> None:
    change_imports(implementation)
    newer_torchao()
    import torchtune.training
    from omegaconf import OmegaConf
    from torchtune.models.llama3 import llama3

    # It empties the caches of GPUs and measures their memory.
    torchtune.training.get_memory_stats = lambda device: {}
    torchtune.training.log_memory_stats = lambda stats: None
    torchtune.training.cleanup_before_training = lambda: None
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        Path(folder, "start").mkdir()
        torch.save(llama3(**SIZES).state_dict(), Path(folder, "start", "weights.pt"))
    dist.barrier()
    config = OmegaConf.create(configure(kind, folder))
    if kind == "lora":
        recipe = load("lora_finetune_distributed").LoRAFinetuneRecipeDistributed(cfg=config)
    else:
        module = load("full_finetune_distributed")
        module.init_process_group = lambda backend: None
        recipe = module.FullFinetuneRecipeDistributed(cfg=config)
    recipe.setup(cfg=config)
    recipe.train()
    dist.barrier()
    for file in sorted(Path(folder, "saved").rglob("*.bin")):
        values = torch.load(file, weights_only=True)
        sums = [value.double().sum().item() for value in values.values() if torch.is_tensor(value)]
        records.append([str(file.relative_to(folder)), *sums])
    write(folder, records, recipe._model)
    recipe.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
