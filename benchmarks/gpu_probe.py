"""What there is beside a GPU: tools, packages, NCCL, memory: `python -m benchmarks.gpu_probe`.

The first thing to run on a machine that is lent: why something later did not run is mostly here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from . import machine
from .gpu import device_description

TOOLS = ("make", "g++", "gcc", "git", "nvcc", "nvidia-smi", "nvidia-cuda-mps-control")
# Clients that tests need, and what benchmarks use if it is there.
PACKAGES = (
    *("accelerate", "hypothesis", "isal", "lightning", "matplotlib", "numpy", "peft", "pytest"),
    *("pytest_timeout", "rich", "safetensors", "timm", "torchao", "transformers", "triton"),
)
VARIABLES = ("CUDA", "FSDP2", "GLOO", "NCCL", "OMP", "OUT", "TORCH", "VIRTUAL")
SMI = "name,memory.total,memory.used,driver_version,compute_mode,clocks.sm,clocks.mem"
SCHEMAS = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_")


def probe() -> dict[str, Any]:
    """All of it, ready for JSON."""
    has_gpu = torch.cuda.is_available()
    return {
        **machine.describe(),
        "interpreter": sys.executable,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
        "tools": {name: shutil.which(name) for name in TOOLS},
        "packages": [name for name in PACKAGES if importlib.util.find_spec(name)],
        "gpu": device_description(torch.device("cuda" if has_gpu else "cpu")),
        "gpu_memory_free_and_total": torch.cuda.mem_get_info() if has_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else None,
        "nvidia-smi": told("nvidia-smi", f"--query-gpu={SMI}", "--format=csv"),
        "shared_memory": told("df", "-m", "/dev/shm"),
        "limits": told("bash", "-c", "ulimit -l -n; free -g; df -h /tmp"),
        "collectives": {name: schema(name) for name in SCHEMAS},
    }


def told(*command: str) -> str:
    """What a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return (done.stdout + done.stderr).strip()[:2000]


def schema(name: str) -> str | None:
    """Of a collective of c10d: whether it takes ``async_op``."""
    operator = getattr(torch.ops.c10d, name, None) if dist.is_available() else None
    return None if operator is None else str(operator.default._schema)


if __name__ == "__main__":
    print(json.dumps(probe(), indent=1))
