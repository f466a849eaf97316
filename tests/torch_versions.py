"""What is run on every supported torch, where the whole suite is too much: `make test-versions`.

A file is here if what it shows rests on torch's own code beside the plain operators: on torch's
FSDP2 as the reference, on libraries that drive us through it, on private names, or on parts of
torch that change between releases. That is about a fifth of the tests. CI runs the whole suite on
the newest torch and these on an older one.
"""

from __future__ import annotations

DEPEND_ON_TORCH_VERSION = {
    "test_checkpointing.py": "torch.utils.checkpoint and its dispatch modes",
    "test_compatibility.py": "names and signatures of torch's API",
    "test_compile.py": "Dynamo",
    "test_copying.py": "how modules and DTensors are copied",
    "test_custom_collectives.py": "the protocol of custom collectives",
    "test_ecosystem_lightning.py": "Lightning, which calls torch's FSDP utilities",
    "test_ecosystem_modules.py": "parametrizations and other modules of torch.nn.utils",
    "test_ecosystem_transformers.py": "transformers, which asks for torch's version",
    "test_estimate.py": "fake tensors",
    "test_extensions.py": "the protocol of tensor subclasses",
    "test_functional.py": "torch.func",
    "test_hsdp.py": "DTensors on 2-D meshes",
    "test_interop.py": "what other code finds in torch's FSDPModule",
    "test_meshes.py": "DeviceMesh: slicing and flattening",
    "test_mixed_precision.py": "the rules of grad_dtype, compared with torch's FSDP2",
    "test_optim_local.py": "internals of torch.optim.Optimizer",
    "test_peer.py": "torch's FSDP2, side by side",
    "test_pipelines.py": "torch.distributed.pipelining, which drives sharded stages",
    "test_serialization.py": "pickled DTensors",
    "test_state_dict.py": "torch.distributed.checkpoint",
    "test_state_dict_functions.py": "torch.distributed.checkpoint.state_dict",
    "test_tensor_parallel.py": "torch.distributed.tensor.parallel",
    "test_torch_suites.py": "cases of torch's own tests",
    "test_transforms.py": "functorch and forward-mode differentiation",
    "test_transports.py": "signatures of collectives",
    "ecosystem/test_dcp.py": "torch.distributed.checkpoint between torch's FSDP2 and ours",
    "unit/test_torch_private.py": "the private names of torch that we use",
    "unit/test_versions.py": "the check of torch's version",
}
