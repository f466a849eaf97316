"""One rank of a training by verl's FSDP engine: a small Llama on sequences of different lengths.

    torchrun --nproc-per-node 2 verl_run.py IMPLEMENTATION FOLDER plain|tied|lora

Each rank writes the loss and the gradient norm of every step, the loss of an evaluation, and sums
of the parameters as the engine gives them to rollouts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import torch
import torch.distributed as dist

from client_programs import change_imports, write

STEPS = 4


def platform() -> Any:
    """verl has none for the CPU."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]

    class CPU(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> str:  # type: ignore[override]
            return "cpu"

        def empty_cache(self) -> None:
            pass

    return CPU()


def start(folder: str, tied: bool) -> None:
    """Save the model that the engine reads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def build(folder: str, lora: bool) -> Any:
    import transformers
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    model = SimpleNamespace(
        local_path=folder,
        hf_config=transformers.AutoConfig.from_pretrained(folder),
        model_type="language_model",
        trust_remote_code=False,
        use_remove_padding=False,
        use_liger=False,
        use_fused_kernels=False,
        fused_kernel_options=None,
        enable_gradient_checkpointing=True,
        enable_activation_offload=False,
        lora_rank=4 if lora else 0,
        lora_alpha=8,
        target_modules="all-linear",
        target_parameters=None,
        exclude_modules=None,
        lora_adapter_path=None,
        lora={},
        get_processor=lambda: None,
    )
    # It patches a class for PPO that newer versions of trl no longer have.
    monkey_patch.is_trl_available = lambda: False
    engine = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32"},
            use_torch_compile=False,
            forward_prefetch=True,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
        ),
        FSDPOptimizerConfig(lr=1e-2, clip_grad=0.5, total_training_steps=STEPS),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(step: int) -> Any:
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    rows = [torch.randint(1, 61, (size,), generator=generator) for size in (8, 5, 7, 6)]
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": [torch.ones(len(row)) for row in rows],
    }
    data = {
        name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
        for name, column in columns.items()
    }
    data["temperature"] = torch.ones(4)
    options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_remove_padding": False}
    return tu.get_tensordict(data, non_tensor_dict=options)


def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return -model_output["log_probs"].values().mean(), {}


def main(implementation: str, folder: str, kind: str) -> None:
    change_imports(implementation)
    from verl.plugin.platform import set_platform

    set_platform(platform())
    dist.init_process_group("gloo")
    saved = str(Path(folder, "start"))
    if dist.get_rank() == 0:
        start(saved, tied=kind == "tied")
    dist.barrier()
    engine = build(saved, lora=kind == "lora")
    records: list[Any] = []
    for step in range(STEPS):
        with engine.train_mode():
            out = engine.train_batch(batch(step), loss)
            records.append([step, out["loss"], out["metrics"]["grad_norm"]])
            engine.lr_scheduler_step()
    with engine.eval_mode():
        records.append(engine.infer_batch(batch(STEPS), loss)["loss"])
    parameters, _ = engine.get_per_tensor_param()
    for name, value in parameters:
        records.append([name, value.double().sum().item()])
    write(folder, records, engine.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
