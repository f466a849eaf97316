"""What is run on every supported torch, where the whole suite is too much: `make test-versions`.

A file is here if what it shows rests on torch's own code beside the plain operators: on torch's
FSDP2 as the reference, on libraries that drive us through it, on private names, or on parts of
torch that change between releases. That is about a fifth of the tests. CI runs the whole suite on
the newest torch and these on an older one.
"""

from __future__ import annotations

DEPEND_ON_TORCH_VERSION = {
    "core/test_activation_checkpoint.py": "torch.utils.checkpoint and its dispatch modes",
    "core/test_compatibility.py": "names and signatures of torch's API",
    "core/test_compile.py": "Dynamo",
    "core/test_compile_gradients.py": "Dynamo, over gradients that are DTensors",
    "core/test_copying.py": "how modules and DTensors are copied",
    "core/test_custom_collectives.py": "the protocol of custom collectives",
    "core/test_double_backward.py": "the autograd engine: backward(create_graph=True)",
    "ecosystem/test_ecosystem_lightning.py": "Lightning, which calls torch's FSDP utilities",
    "ecosystem/test_ecosystem_modules.py": "parametrizations and other modules of torch.nn.utils",
    "ecosystem/test_ecosystem_transformers.py": "transformers, which asks for torch's version",
    "tools/test_estimate.py": "fake tensors",
    "core/test_extensions.py": "the protocol of tensor subclasses",
    "core/test_finalization.py": "finalization of backward, whose API torch has since 2.15",
    "core/test_functional.py": "torch.func",
    "core/test_grad_dtype.py": "`grad_dtype`, which torch changed in 2.15",
    "graph/test_compile_step.py": "make_fx, functional collectives and AOTAutograd",
    "core/test_hsdp.py": "DTensors on 2-D meshes",
    "core/test_interop.py": "what other code finds in torch's FSDPModule",
    "core/test_meshes.py": "DeviceMesh: slicing and flattening",
    "core/test_mixed_precision.py": "the rules of grad_dtype, compared with torch's FSDP2",
    "optim/test_optim_local.py": "internals of torch.optim.Optimizer",
    "core/test_peer.py": "torch's FSDP2, side by side",
    "core/test_two_ranks.py": "torch's FSDP2, side by side; names of coalesced collectives",
    "core/test_pipelines.py": "torch.distributed.pipelining, which drives sharded stages",
    "core/test_pipelines_loss.py": "zero-bubble schedules, which split backward",
    "checkpoint/test_serialization.py": "pickled DTensors",
    "checkpoint/test_state_dict.py": "torch.distributed.checkpoint",
    "checkpoint/test_state_dict_functions.py": "torch.distributed.checkpoint.state_dict",
    "core/test_tensor_parallel.py": "torch.distributed.tensor.parallel",
    "core/test_tensor_subclasses.py": "what torch's FSDP2 calls on tensor subclasses",
    "core/test_torch_suites.py": "cases of torch's own tests",
    "core/test_transforms.py": "functorch and forward-mode differentiation",
    "core/test_transports.py": "signatures of collectives",
    "ecosystem/test_dcp.py": "torch.distributed.checkpoint between torch's FSDP2 and ours",
    "unit/test_torch_private.py": "the private names of torch that we use",
    "unit/test_versions.py": "the check of torch's version",
}
