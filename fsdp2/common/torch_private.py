"""Every private name of torch that this package uses, its purpose, and what happens without it.

A name is private if it has a part with a leading underscore: a module, a function or an attribute.
The code uses these names directly; this file only lists them. `tests/unit/test_torch_private.py`
searches the source of the package and fails at a name that is not in the list. It also looks every
listed name up in the installed torch.

`check` runs at the first use of a public name, and at the import of a public module that trains or
stores. If torch lacks an indispensable name, the import fails with all such names and their use.
Without the check, a training step would fail with an `AttributeError`.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .versions import tested_torch


@dataclass(frozen=True)
class PrivateName:
    """One name.

    Attributes:
        name: where it is found: a dotted path, in which ``()`` stands for an instance made without
            arguments (``torch.nn.Module()._parameters``).
        use: its purpose.
        without: what happens where torch lacks it; empty: the package cannot be imported.
        checked: the releases of torch in which the name was looked up and its use tested.
    """

    name: str
    use: str
    without: str = ""
    checked: tuple[str, ...] = tested_torch()


def _names(use: str, *names: str, without: str = "") -> tuple[PrivateName, ...]:
    return tuple(PrivateName(name, use, without) for name in names)


AUTOGRAD = (
    *_names("whether a backward is running", "torch._C._current_graph_task_id"),
    *_names("whether a forward is running", "torch.nn.Module._call_impl"),
    *_names(
        "whether a backward accumulates gradients of a unit",
        "torch._C._will_engine_execute_node",
    ),
    *_names(
        "the callback at the end of backward, and whether it was asked for inputs",
        "torch.autograd.Variable._execution_engine",
    ),
    *_names(
        "hooks that must see each gradient before it is reduced together with others",
        "torch.Tensor._post_accumulate_grad_hooks",
    ),
    *_names(
        "the hooks of a tensor that ``register_hook`` was called on",
        "torch.Tensor._backward_hooks",
    ),
    *_names(
        "one dictionary of hooks for many tensors",
        "torch._C._FunctionBase._register_hook_dict",
    ),
    *_names(
        "which gradients a backward is asked for by ``inputs``",
        "torch.autograd._engine_run_backward",
        "torch.autograd.graph._engine_run_backward",
        without="gradients asked for of sharded parameters are not there, as with torch's FSDP2",
    ),
    *_names(
        "whether a user chose the dtype of gradients",
        "torch.Tensor._has_grad_dtype_override",
        without="a choice of the dtype that the parameter has anyway is taken for none",
    ),
    *_names("whether shards were written since they were gathered", "torch.Tensor._version"),
    *_names("hooks on what a view was made of, for a use in place", "torch.Tensor._base"),
    *_names(
        "filling the unsharded tensors of an extension without a change that autograd sees",
        "torch.autograd._unsafe_preserve_version_counter",
    ),
)

MEMORY = (
    *_names(
        "whether anything still refers to memory that may be freed or written",
        "torch._C._storage_Use_Count",
        "torch.UntypedStorage._cdata",
        "torch.Tensor._use_count",
    ),
    *_names(
        "which saved tensors are views of the same content",
        "torch.Tensor._cdata",
        "torch._C._WeakTensorRef",
    ),
    *_names(
        "neighbours in memory as one tensor, to step them together",
        "torch._C._construct_storage_from_data_pointer",
    ),
    *_names("whether `.data` of a DTensor was set, in vain", "torch._C._storage_address"),
    *_names(
        "streams that users record on shards and gradients (``record_stream``)",
        "torch._C.DispatchKey",
    ),
    *_names(
        "shards cannot be shared with other processes: an error instead of old values",
        "torch.UntypedStorage._share_fd_cpu_",
        "torch.UntypedStorage._share_filename_cpu_",
        "torch.UntypedStorage._share_cuda_",
        without="another name does the same, and a shard that is shared keeps old values",
    ),
    *_names(
        "a parameter without memory in place of one that was freed early",
        "torch.Tensor._make_wrapper_subclass",
        "torch._C.DisableTorchFunctionSubclass",
    ),
    *_names(
        "one kernel for many tensors",
        "torch._foreach_copy_",
        "torch._foreach_div",
        "torch._foreach_div_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._foreach_zero_",
        "torch._chunk_cat",
        "torch._utils._flatten_dense_tensors",
        "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    ),
)

DISTRIBUTED = (
    *_names(
        "this rank's part of a DTensor without autograd and dispatch",
        "torch.distributed.tensor.DTensor._local_tensor",
    ),
    *_names(
        "a DTensor of a device mesh over a shard in host memory",
        "torch.distributed.tensor.DTensor._spec",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
    ),
    *_names(
        "a dim that tensor parallelism and we both cut",
        "torch.distributed.tensor.placement_types._StridedShard",
    ),
    *_names(
        "shards of whole blocks of rows",
        "torch.distributed.tensor.placement_types._StridedShard._split_tensor",
        "torch.distributed.tensor._redistribute._gen_transform_infos_non_cached",
        "torch.distributed.tensor._redistribute._TransformInfo",
        without="`shard_granularity` raises `NotImplementedError`",
    ),
    *_names(
        "meshes of some dims of a mesh, and the mesh that one was cut from",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "torch.distributed.device_mesh.DeviceMesh._concatenate",
        "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    ),
    *_names(
        "which backend serves a device",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._device_types",
    ),
    *_names(
        "the store that checkpoints and the checks of ranks meet at",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._get_default_group",
    ),
    *_names(
        "how long the collectives of a group wait",
        "torch._C._distributed_c10d.Backend.Options._timeout",
        without="ranks wait for each other before the first forward for half an hour",
    ),
    *_names(
        "process groups in addition to a mesh's, made by their ranks alone",
        "torch.distributed.distributed_c10d._world",
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.distributed_c10d._register_process_group",
    ),
    *_names(
        "local parts that a collective is still writing",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    ),
    *_names(
        "the registry in which composable functions note what they were applied to",
        "torch.distributed._composable.contract.REGISTRY_KEY",
        "torch.distributed._composable.contract.RegistryItem",
        "torch.distributed._composable.contract.STATE_KEY",
    ),
    *_names(
        "the mesh of a sharded module, in the form in which other libraries read it",
        "torch.distributed.fsdp._fully_shard._fsdp_common.DDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo",
    ),
    *_names(
        "a clear error from torch's `fully_shard` on a module that ours has sharded",
        "torch.distributed.fsdp._fully_shard._fsdp_init._get_managed_modules",
        without="torch raises `TypeError: Invariant encountered`",
    ),
    *_names(
        "timeouts in torch's `clip_grad_norm_`, with the ranks that it waited for",
        "torch.nn.utils.clip_grad._get_total_norm",
        "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        without="the error of the backend alone",
    ),
    *_names(
        "`set_symm_mem_for_comm`",
        "torch.distributed._symmetric_memory",
        without="an ImportError where it is called",
    ),
)

MODULES = (
    *_names(
        "parameters, buffers and hooks of modules, exchanged without the checks of their setters",
        "torch.nn.Module()._parameters",
        "torch.nn.Module()._buffers",
        "torch.nn.Module()._non_persistent_buffers_set",
        "torch.nn.Module()._forward_hooks",
        "torch.nn.Module()._forward_pre_hooks",
        "torch.nn.Module()._state_dict_pre_hooks",
        "torch.nn.Module._apply",
    ),
    *_names("all modules of a model, without a generator for each", "torch.nn.Module()._modules"),
    *_names("what `load_*` returns", "torch.nn.modules.module._IncompatibleKeys"),
    *_names(
        "whether `torch.func.functional_call` put other parameters into a module",
        "torch.nn.utils.stateless._functional_call",
    ),
)

OPTIMIZERS = (
    *_names("step hooks around a replaced step", "torch.optim.Optimizer._patch_step_function"),
    *_names(
        "what schedulers note about a step, to warn of steps in the wrong order",
        "torch.optim.Optimizer._opt_called",
        "torch.optim.Optimizer.step._wrapped_by_lr_sched",
        without="schedulers warn that the optimizer has not stepped",
    ),
)

MODES = (
    *_names(
        "hooks that `torch.func` transforms do not see",
        "torch._C._are_functorch_transforms_active",
        "torch._C._DisableFuncTorch",
        "torch._C._functorch.get_unwrapped",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch.autograd.forward_ad._current_level",
    ),
    *_names(
        "hooks that the type checker of spmd_types does not see",
        "torch._C._len_torch_function_stack",
    ),
    *_names(
        "hooks that selective activation checkpointing does not see",
        "torch._C._len_torch_dispatch_stack",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch._pop_mode",
        "torch.utils._python_dispatch._push_mode",
    ),
    *_names(
        "the modes of selective activation checkpointing",
        "torch.utils.checkpoint._CachedTorchDispatchMode",
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        without="no mode is taken off",
    ),
    *_names(
        "hooks that torch.compile runs as they are",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        without="on a torch without a compiler: nothing has to be kept out",
    ),
)

TRACING = (
    *_names(
        "a step on fake tensors",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
    ),
    *_names(
        "results of operators on fake tensors, made anew",
        "torch._C._DisableTorchDispatch",
        "torch._ops.OpOverload",
    ),
    *_names(
        "a step as one graph (`fsdp2.graph`): its collectives, its backend, what it looks for",
        "torch.ops._c10d_functional.all_gather_into_tensor.default",
        "torch.ops._c10d_functional.all_reduce.default",
        "torch.ops._c10d_functional.reduce_scatter_tensor.default",
        "torch.ops._c10d_functional.wait_tensor.default",
        "torch.ops.aten._to_copy",
        "torch.ops.aten._unsafe_view",
        "torch._dynamo.lookup_backend",
        "torch.utils._pytree.TreeSpec",
        "torch.nn.RNNBase._init_flat_weights",
        without="compile_step does not work",
    ),
    *_names(
        "attention in a graph that is traced for a compiler",
        "torch._subclasses.functional_tensor.FunctionalTensor",
    ),
    *_names(
        "the graphs that torch.compile makes of a module",
        "torch._inductor.decomposition.select_decomp_table",
        without="no predictions for compiled modules",
    ),
    *_names(
        "activation checkpointing inside of compiled modules, which predictions refuse",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
        without="it is not noticed",
    ),
    *_names(
        "a step over tensor-parallel or context ranks that do not exist",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        without="no predictions for tensor_ranks and context_ranks",
    ),
    *_names(
        "separate gradients of inputs and of weights, as pipeline stages compute them",
        "torch.distributed.pipelining._backward",
        without="no predictions for zero-bubble schedules",
    ),
    *_names(
        "attention over parts of a sequence, as `context_parallel` runs it",
        "torch.distributed.tensor.experimental._attention._cp_options",
        "torch.distributed.tensor.experimental._attention._disable_context_parallel_dispatcher",
        "torch.distributed.tensor.experimental._attention._enable_context_parallel_dispatcher",
        without="no predictions for context_ranks",
    ),
    *_names(
        "the operators that DTensor tries on whole shapes",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator"
        "._propagate_tensor_meta_non_cached",
        without="steps are not traced",
    ),
    *_names(
        "watching the operations of a step",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_iter",
        "torch.utils._pytree.tree_unflatten",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch.ops.aten.add.Tensor._schema",
    ),
    *_names(
        "the kernels of accelerators in a step that is traced without one",
        "torch.library._scoped_library",
        "torch.ops.aten.dropout.default._uncache_dispatch",
        "torch.ops.aten._scaled_dot_product_attention_math",
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        "torch.ops.aten._scaled_dot_product_flash_attention",
        "torch.nn.attention.flex_attention._validate_device",
    ),
    *_names(
        "`.item()` of a DTensor while weights are initialized",
        "torch.ops.aten._local_scalar_dense",
    ),
    *_names(
        "the flight recorder, written when a rank hangs",
        "torch._C._distributed_c10d._dump_fr_trace",
        "torch._C._distributed_c10d._dump_nccl_trace",
        without="a report of a hang has no record of collectives",
    ),
    *_names(
        "a simulated link on CUDA",
        "torch.cuda._sleep",
        without="an AttributeError from the test tool that uses it",
    ),
)

NAMES: tuple[PrivateName, ...] = (
    *AUTOGRAD,
    *MEMORY,
    *DISTRIBUTED,
    *MODULES,
    *OPTIMIZERS,
    *MODES,
    *TRACING,
)


def find(name: str) -> Any:
    """What a `PrivateName` stands for.

    Raises:
        AttributeError, ImportError: torch does not have it.
    """
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        found = _inside(found, part.removesuffix("()"), path)
        if part.endswith("()"):
            found = found()
    return found


def _inside(found: Any, part: str, path: str) -> Any:
    # A submodule comes first: a function of the same name may hide it.
    if isinstance(found, ModuleType) and path in sys.modules:
        return sys.modules[path]
    if isinstance(found, ModuleType) and not hasattr(found, part):
        return importlib.import_module(path)
    return getattr(found, part)


def check(names: tuple[PrivateName, ...] = NAMES) -> None:
    """Look up the names that the package cannot do without.

    Raises:
        ImportError: if torch lacks some of them; the message lists all, and their purpose.
    """
    missing = []
    for entry in names:
        if entry.without:
            continue
        try:
            find(entry.name)
        except (AttributeError, ImportError):
            missing.append(f"\n  {entry.name}: {entry.use}")
    if missing:
        raise ImportError(
            f"fsdp2 needs private names of torch that torch {torch.__version__} does not have; it "
            f"is tested with torch {tested_torch()[0]} to {tested_torch()[-1]}:{''.join(missing)}"
        )


check()
