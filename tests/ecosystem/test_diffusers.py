"""Models of diffusers: what they save while they are sharded."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp2 import fully_shard
from harness import distributed, ours_only, shared_folder

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed"),
    ours_only("torch's raises on every rank, or pickles shards"),
]


@distributed(2, timeout_s=280)
def test_save_pretrained_of_an_autoencoder() -> None:
    """On all ranks, as safetensors in parts and pickled: the files of a plain model."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    plain = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    model = fully_shard(copy.deepcopy(plain))
    for safe in (True, False):
        with shared_folder() as ours, shared_folder() as theirs:
            options = {"safe_serialization": safe, "max_shard_size": "200KB"}
            model.save_pretrained(ours, **options)
            if dist.get_rank() == 0:
                plain.save_pretrained(theirs, **options)
                names = sorted(path.name for path in Path(theirs).iterdir())
                assert sorted(path.name for path in Path(ours).iterdir()) == names
                if safe:
                    for name in names:
                        assert Path(ours, name).read_bytes() == Path(theirs, name).read_bytes()
            read = AutoencoderKL.from_pretrained(ours, use_safetensors=safe).state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(read[name], value), name
