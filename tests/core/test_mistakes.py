"""What new users trip over is answered by an error that says what to do, and changes nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import RUNS_ON_TORCH, cached_mesh, distributed, ours_only
from models import TRANSFORMER
from reference import (
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    pair,
    run_both,
    whole,
)

pytestmark = ours_only("messages of its own")

if not RUNS_ON_TORCH:
    from fsdp2 import DataParallelMeshDims, load_full_state_dict, replicate, shard_model
    from fsdp2.features.early_free.freed_params import FreedParameterProxy


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def error_of(
    action: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...], *parts: str
) -> str:
    """The message, in which every part occurs."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    return text


def unchanged(model: nn.Module, action: Callable[[], Any], *parts: str) -> None:
    """The call is refused, and leaves the model as it was."""
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    hooks = [len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]
    error_of(action, (TypeError, ValueError), *parts)
    assert [type(module) for module in model.modules()] == kinds
    now = [len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]
    assert now == hooks
    for name, param in model.named_parameters():
        assert param is before[name][0], name
        same = param.detach() == before[name][1]
        assert (same.full_tensor() if isinstance(same, DTensor) else same).all(), name


# ------------------------------------------------------------------- what cannot be sharded


@distributed(1, 2)
def test_lazy_modules_before_their_first_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(5), nn.LazyBatchNorm1d())
    texts = ("'1.weight' (LazyLinear) has no shape yet", "run the model once")
    with pytest.raises(ValueError) as caught:
        fully_shard(model)
    assert all(part in str(caught.value) for part in texts), caught.value
    assert not isinstance(model, FSDPModule)
    model(torch.ones(2, 4))
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert_sharded(model)


@distributed(1, 2)
def test_modules_of_torch_jit() -> None:
    linear = nn.Linear(4, 4)
    for made in (torch.jit.script(linear), torch.jit.trace(linear, torch.ones(2, 4))):
        model = nn.Sequential(made, nn.Linear(4, 4))
        texts = (type(made).__name__, "torch.jit", "made from")
        error_of(lambda m=model: fully_shard(m), ValueError, "'0.weight'", "ignored_params", *texts)  # type: ignore[misc]
        error_of(lambda m=made: fully_shard(m), ValueError, "torch.compile", *texts)  # type: ignore[misc]
        assert not isinstance(model, FSDPModule)
        fully_shard(model, ignored_params=set(made.parameters()))
        model(torch.ones(2, 4)).sum().backward()
        assert isinstance(model[1].weight.grad, DTensor)


# ------------------------------------------------------------------- what is already sharded


@distributed(1, 2)
def test_the_root_before_its_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 4), mlp())
    fully_shard(model)
    inner = model[1]
    texts = ("'1.0.weight'", "already sharded", "unit '(root)'", "bottom-up", "blocks")
    unchanged(model, lambda: fully_shard(inner), *texts)
    unchanged(model, lambda: replicate(inner), *texts)
    model(torch.ones(3, 2)).sum().backward()
    assert_sharded(model)


@distributed(1, 2)
def test_modules_of_another_unit_run_only_under_a_common_root() -> None:
    plain = nn.Sequential(mlp(), mlp())
    plain[1][0] = plain[0][0]  # type: ignore[index, operator]
    model = copy.deepcopy(plain)
    for module in model:
        fully_shard(module)
    x = torch.ones(3, 4) + dist.get_rank()
    error_of(lambda: model[1](x), ValueError, "'0.weight'", "another FSDP group", "common parent")
    fully_shard(model)
    for each in (model, plain):
        each(x).sum().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(1, 2)
def test_a_tied_weight_of_a_module_that_is_in_two_units() -> None:
    """The root takes the weight, as only it is gathered around all uses."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    plain[1][0] = plain[0]  # type: ignore[index, operator]
    plain[1][1].weight = plain[0].weight  # type: ignore[index, union-attr]
    for inner in ((0, 1), (0,), (1,)):
        model = copy.deepcopy(plain)
        for index in inner:
            fully_shard(model[index])
        fully_shard(model)
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(3, 4) + dist.get_rank()).sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)


@distributed(1, 2)
def test_a_block_that_torch_has_sharded() -> None:
    model = mlp()
    torch_fsdp.fully_shard(model[1])
    texts = ("Module '1'", "by torch.distributed.fsdp.fully_shard", "imported from torch")
    unchanged(model, lambda: fully_shard(model), *texts)


@distributed(2)
def test_a_block_of_a_model_that_torch_has_sharded() -> None:
    model = mlp()
    torch_fsdp.fully_shard(model)
    texts = ("'weight'", "(Shard(dim=0),)", "(or torch's)", "bottom-up")
    unchanged(model, lambda: fully_shard(model[0]), *texts)


@distributed(2)
def test_a_tensor_parallel_mesh_that_is_also_the_data_parallel_one() -> None:
    model = mlp()
    mesh = cached_mesh(2)
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, mesh, [Shard(1)]))
    unchanged(model, lambda: fully_shard(model, mesh=mesh), "'0.weight'", 'mesh["tp"]')


@distributed(2)
def test_dtensors_on_another_mesh_of_the_same_ranks_than_the_one_that_is_named() -> None:
    """As in torch's messages, for scripts and tests that look for them."""
    model = mlp()
    named = cached_mesh(2, 1, names=("dp", "tp"))
    other = DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="dp")
    for mesh, placements, part in (
        (other, [Replicate(), Replicate()], "same mesh passed to fully_shard"),
        (named, [Shard(0), Replicate()], "Expected Replicate() on DP"),
    ):
        whole = model[0].weight.detach()
        model[0].weight = nn.Parameter(distribute_tensor(torch.ones_like(whole), mesh, placements))
        unchanged(
            model, lambda: fully_shard(model, mesh=named, dp_mesh_dims=dims), "'0.weight'", part
        )
        model[0].weight = nn.Parameter(torch.ones(6, 4))


@distributed(4)
def test_parallel_meshes_that_are_not_of_one_mesh() -> None:
    model = mlp()
    parallel = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "tp"))["tp"]
    data = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("b", "dp"))["dp"]
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, parallel, [Shard(0)]))
    unchanged(
        model,
        lambda: fully_shard(model, mesh=data),
        "FSDP requires the DP and model parallel TP/EP mesh",
    )


# -------------------------------------------------------------------------------- arguments


class Half(torch.Tensor):
    """Defines one half of the extension of all-gathers."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None


@distributed(2)
def test_words_of_torch() -> None:
    """What tests and scripts match in torch's messages is in ours."""
    done = fully_shard(mlp())
    unchanged(done, lambda: fully_shard(done), "can only be applied to a module once")
    layers = nn.ModuleList([nn.Linear(2, 2)])
    part = "fully_shard does not support containers that do not implement forward"
    unchanged(layers, lambda: fully_shard(layers), part)
    model = mlp()
    part = "should be a bool or an int representing the group size to reshard to, not 'yes'"
    unchanged(model, lambda: fully_shard(model, reshard_after_forward="yes"), part)
    part = "Shard dim 2 is invalid for 2D tensor"
    unchanged(model, lambda: fully_shard(model, shard_placement_fn=lambda p: Shard(2)), part)
    model[1].weight = nn.Parameter(torch.ones(4, 6).as_subclass(Half))
    part = "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"
    unchanged(model, lambda: fully_shard(model), part)
    model = mlp()
    meta = DeviceMesh("meta", torch.arange(2), _init_backend=False)
    whole = DTensor.from_local(torch.ones(6, 4, device="meta"), meta, [Replicate()])
    model[0].weight = nn.Parameter(whole)
    part = "Requires DTensor to have mesh of the same type as the FSDP mesh but got meta"
    with pytest.raises(ValueError, match=part):
        fully_shard(model)
    assert not isinstance(model, FSDPModule)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer)
    part = "is shared with a parameter already managed by another FSDP group"
    error_of(lambda: fully_shard(nn.Sequential(model[1]))(torch.ones(1, 4)), ValueError, part)
    with torch.device("meta"):
        model = fully_shard(mlp())
    part = "FSDP parameters should be materialized from meta device before training"
    error_of(lambda: model(torch.ones(2, 4)), RuntimeError, part)


@distributed(2)
def test_arguments_that_make_no_sense() -> None:
    model = mlp()
    fully_shard(model[0])
    for options, parts in (
        ({"ignored_params": ["1.weight"]}, ("ignored_params", "get_parameter('1.weight')")),
        ({"ignored_params": "1.weight"}, ("ignored_params", "get_parameter('1.weight')")),
        ({"ignored_params": model[1].weight}, ("ignored_params", "put it in a set")),
        ({"ignored_params": {1}}, ("ignored_params", "but 1 is not one")),
        ({"ignored_params": 1}, ("ignored_params", "but 1 is not one")),
        ({"direct_min_bytes": -1}, ("direct_min_bytes", "-1")),
        ({"direct_min_bytes": "1MB"}, ("direct_min_bytes", "'1MB'")),
        ({"direct_min_bytes": True}, ("direct_min_bytes", "True")),
        ({"mp_policy": torch.bfloat16}, ("mp_policy", "MixedPrecisionPolicy")),
        ({"reshard_after_forward": 5}, ("reshard_after_forward", "factor of 2")),
        ({"shard_placement_fn": lambda p: Shard(1)}, ("'1.bias'", "on dim 1")),
        ({"shard_placement_fn": lambda p: "row"}, ("Invalid shard_placement_fn result", "'row'")),
    ):
        unchanged(model, lambda options=options: fully_shard(model, **options), *parts)
    fully_shard(model, ignored_params=[model[1].bias], direct_min_bytes=2**60)
    assert isinstance(model[1].weight, DTensor)
    assert not isinstance(model[1].bias, DTensor)
    model(torch.ones(2, 4)).sum().backward()


@distributed(2)
def test_a_refused_root_takes_no_tied_parameter_from_its_blocks() -> None:
    model = mlp()
    model[1] = nn.Linear(4, 6)
    model[1].weight = model[0].weight
    fully_shard(model[0])
    owner = model[0].weight
    with pytest.raises(ValueError, match="on dim 3"):
        fully_shard(model, shard_placement_fn=lambda p: Shard(3))
    assert model[0].weight is owner
    fully_shard(model)
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, DTensor)


def test_dtypes_that_are_none() -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        error_of(
            lambda name=name: MixedPrecisionPolicy(**{name: "bf16"}),
            TypeError,
            name,
            "torch.bfloat16",
            "'bf16'",
        )
    error_of(lambda: MixedPrecisionPolicy(torch.int8), TypeError, "floating-point", "int8")
    assert MixedPrecisionPolicy(torch.float16, None, torch.float64).param_dtype is torch.float16


@distributed(2)
def test_dtypes_of_torchs_policy_that_are_none() -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype="bf16")  # pyright: ignore
    unchanged(mlp(), lambda: fully_shard(mlp(), mp_policy=policy), "param_dtype", "'bf16'")


@distributed(4)
def test_units_inside_that_forget_the_replicas() -> None:
    """A warning: gradients of the first are not averaged over all ranks, so replicas drift."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    for inner, part in (
        (mesh["shard"], "not averaged over the 2 replicas"),
        (None, "has no replicas"),
    ):
        model = mlp()
        fully_shard(model[0], mesh=inner)
        with pytest.warns(UserWarning, match=part) as caught:
            fully_shard(model, mesh=mesh)
        assert "Unit '0'" in str(caught[0].message)
        assert "same mesh=" in str(caught[0].message)
        assert caught[0].filename == __file__


@distributed(4)
def test_units_inside_that_are_meant_to_be_on_another_mesh() -> None:
    """No warning for replicated units, tensor parallelism, and a root that is not hybrid."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        replicate(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model = mlp()
        fully_shard(model[0], mesh=mesh["shard"])
        fully_shard(model)
        model = mlp()
        for name, param in model[0].named_parameters():
            whole = distribute_tensor(param.detach(), mesh["replicate"], [Shard(0)])
            setattr(model[0], name, nn.Parameter(whole))
        fully_shard(model[0], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])


@distributed(2)
def test_wrap_in_the_words_of_the_command_line() -> None:
    model = shard_model(mlp(), wrap="class:Linear")
    assert all(isinstance(layer, FSDPModule) for layer in model)
    model = shard_model(mlp(), wrap="size:110B")
    assert [isinstance(layer, FSDPModule) for layer in model] == [True, True]
    model = mlp()
    unchanged(model, lambda: shard_model(model, wrap="class:Block"), "no module of class Block")
    unchanged(model, lambda: shard_model(model, wrap="size:much"), "'much' is not a size")


# ---------------------------------------------------------------------- inference mode


@distributed(1, 2)
def test_a_model_made_or_sharded_in_inference_mode_trains() -> None:
    for made, sharded in ((True, False), (False, True), (True, True)):
        case = TRANSFORMER
        _, plain = pair(case)
        torch.manual_seed(0)
        with torch.inference_mode(made):
            model = case.build().double()
        with torch.inference_mode(sharded):
            for unit in case.units(model):
                fully_shard(unit)
            fully_shard(model)
        for step in range(2):
            run_both(case, model, plain, step)
            assert_same_gradients(model, plain)


# ----------------------------------------------------- parameters behind the unit's back


@distributed(2)
def test_the_guard_knows_the_full_name_before_the_first_forward() -> None:
    class Chat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"layers": nn.ModuleList([mlp()])})

        def forward(self, x: Tensor) -> Tensor:
            return self.body["layers"][0](x)  # type: ignore[index]

    model = Chat()
    block = model.body["layers"][0]  # type: ignore[index]
    fully_shard(block)
    fully_shard(model)
    error_of(
        lambda: block[1](torch.ones(1, 6)),
        RuntimeError,
        "body.layers.0.1.weight",
        "'body.layers.0'",
        "register_fsdp_forward_method(module, 'generate')",
        "unshard()",
    )


@distributed(1, 2)
def test_writes_by_data_are_refused_and_change_nothing() -> None:
    """DTensors lose them without a word."""
    model, plain, x = mlp(), mlp(), torch.ones(2, 4)
    fully_shard(model[0])
    fully_shard(model)
    advice = "model.load_state_dict({'0.weight': whole}, strict=False)"

    def whole() -> None:
        model[0].weight.data = torch.ones(6, 4)

    def dtensor() -> None:
        model[0].weight.data = model[0].weight.data * 2

    def dtype() -> None:
        model[0].weight.data = torch.ones(6, 4, dtype=torch.bfloat16)

    def vector() -> None:
        nn.utils.vector_to_parameters(torch.zeros(30), model[0].parameters())

    def until_memory_is_used_again() -> None:
        weight = model[0].weight
        before = torch._C._storage_address(weight)
        for _ in range(100):
            weight.data = torch.ones(6, 4)
            if torch._C._storage_address(weight) == before:
                return

    writes = (whole, dtensor, dtype, vector, until_memory_is_used_again)
    actions = (model.state_dict, lambda: model(x))
    for step in range(2):  # before the first forward, and after a step
        for write in writes:
            for action in actions:
                write()
                error_of(action, RuntimeError, "'0.weight'", "param.data = ...", advice)
                assert torch.equal(model(x), plain(x)), (step, write.__name__)
                model.reshard()  # type: ignore[operator]
        with torch.no_grad():
            model[1].bias.copy_(model[1].bias * 2)
            plain[1].bias.copy_(plain[1].bias * 2)
        model.load_state_dict({"0.weight": torch.full((6, 4), 0.5)}, strict=False)
        plain.load_state_dict({"0.weight": torch.full((6, 4), 0.5)}, strict=False)
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()


@ours_only("warns")
@pytest.mark.parametrize("where", ["by hand", "in forward", "kept after forward"])
@distributed(2)
def test_writes_to_gathered_parameters_are_lost_with_a_warning(where: str) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.1 if where == "in forward" else None))
    keep = where == "kept after forward"
    fully_shard(model, reshard_after_forward=not keep)
    x = torch.tensor([1, 2])
    text = r"Parameter '0.weight' of unit '.root.' was written while gathered.*load_state_dict"
    written = pytest.warns(UserWarning, match=text)
    before = whole(model[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5 if where != "in forward" else 0):  # nothing to warn of yet
            model(x).sum().backward()
            model.unshard()  # type: ignore[operator]
            model.reshard()  # type: ignore[operator]
    if where == "in forward":
        with written:
            for _ in range(3):
                model(x).sum().backward()
    elif where == "by hand":
        with written:
            model.unshard()  # type: ignore[operator]
            with torch.no_grad():
                model[0].weight.zero_()  # type: ignore[operator]
            model.reshard()  # type: ignore[operator]
    else:
        with written, torch.no_grad():
            for _ in range(4):
                model(x)
                model[0].weight.mul_(2)  # type: ignore[operator]
                model[0].weight.grad = None
                model.reshard()  # type: ignore[operator]
    assert torch.equal(whole(model[0].weight), before)


@distributed(2)
def test_assignments_of_data_that_change_nothing_and_moves_are_no_mistakes() -> None:
    model, plain, x = mlp(), mlp().double(), torch.ones(2, 4)
    fully_shard(model[0])
    fully_shard(model)
    for step in range(2):
        for param in model.parameters():
            param.data = param.data
            param.data.mul_(2)
        for param in plain.parameters():
            param.data.mul_(2)
        model.double() if step else model.to("cpu")
        x = x.to(model[0].weight.dtype)
        torch.testing.assert_close(model(x).double(), plain(x.double()))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        torch.testing.assert_close(model(x).double(), plain(x.double()))
        model.reshard()  # type: ignore[operator]


@distributed(2)
def test_state_dicts_of_wrapped_models() -> None:
    model, plain = mlp(), mlp()
    fully_shard(model[0])
    fully_shard(model)
    for prefix, wrapper in (
        ("module.", "DistributedDataParallel"),
        ("_orig_mod.", "torch.compile"),
    ):
        state = {prefix + name: value for name, value in plain.state_dict().items()}
        advice = f"consume_prefix_in_state_dict_if_present(state_dict, '{prefix}')"
        for load in (model.load_state_dict, lambda s: load_full_state_dict(model, s)):
            given = dict(state)
            text = error_of(partial(load, given), RuntimeError, wrapper, advice)
            assert text.count("consume_prefix") == 1
        model.load_state_dict(dict(state), strict=False)
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, prefix)
        model.load_state_dict(state)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"other": torch.ones(1)})
    assert "begin with" not in str(caught.value)


# ------------------------------------------------------ optimizers that were built too early


def sharded_mlp(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0])
    return fully_shard(model)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    torch.optim.AdamW,
]


@pytest.mark.parametrize("which", range(len(OPTIMIZERS)))
@distributed(1, 2)
def test_an_optimizer_built_before_sharding(which: int) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[which](model.parameters())
    sharded_mlp(model)
    model(torch.ones(2, 4)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]

    def unchanged_ones() -> list[bool]:
        pairs = zip(model.parameters(), before, strict=True)
        return [bool((a == b).full_tensor().all()) for a, b in pairs]  # type: ignore[attr-defined]

    error_of(
        optimizer.step,
        RuntimeError,
        type(optimizer).__name__,
        "built before fully_shard",
        "'0.weight' and 3 more",
        "Build it after fully_shard",
    )
    assert all(
        (a == b).full_tensor().all() for a, b in zip(model.parameters(), before, strict=True)
    )
    OPTIMIZERS[which](model.parameters()).step()
    assert not any(
        (a == b).full_tensor().all() for a, b in zip(model.parameters(), before, strict=True)
    )


@distributed(2)
def test_an_optimizer_of_two_models_one_of_which_is_sharded_after_it() -> None:
    """Its step would change the other one only."""
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)
    sharded_mlp(model)
    model(other(torch.ones(2, 4))).sum().backward()
    error_of(optimizer.step, RuntimeError, "built before fully_shard", "'0.weight' and 3 more")


@distributed(2)
def test_optimizers_that_hold_originals_and_are_right() -> None:
    """The originals live on, and nothing is wrong."""
    from fsdp2.guards import optimizer_checks

    # Accelerate puts the sharded parameters into the optimizer that it was given.
    model = mlp()
    originals = list(model.parameters())
    early = torch.optim.AdamW(originals)
    sharded_mlp(model)
    early.param_groups[0]["params"] = list(model.parameters())
    # A teacher that is not sharded shares the parameters, and is trained by an optimizer.
    shared = mlp()
    teacher = nn.Sequential(shared[0], nn.Linear(6, 2))
    student = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    student[0].weight = nn.Parameter(shared[0].weight.detach().clone())
    student[1].weight = shared[1].weight
    of_teacher = torch.optim.SGD([*teacher.parameters(), shared[1].weight], lr=0.1)
    sharded_mlp(student)
    for step in range(2):
        for module in (model, student):
            module(torch.ones(2, 4)).sum().backward()
        (shared(torch.ones(2, 4)).sum() + teacher(torch.ones(2, 4)).sum()).backward()
        late = torch.optim.AdamW(model.parameters())
        for optimizer in (early, late, of_teacher):
            optimizer.step()
        assert early in optimizer_checks._fine
        assert of_teacher not in optimizer_checks._fine, step
        for optimizer in (early, late, of_teacher):
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["evaluation", "unshard", "forward", "freed"])
@distributed(1, 2)
def test_an_optimizer_built_while_parameters_are_gathered(way: str) -> None:
    model: Any = mlp()
    x = torch.ones(2, 4)
    if way == "freed":
        model = nn.Sequential(nn.Embedding(65536, 8), nn.Linear(8, 4))
        x = torch.zeros(2, 3, dtype=torch.long)
    for module in (model[1], model):
        fully_shard(module, reshard_after_forward=False if way == "evaluation" else None)
    sharded = list(model.parameters())
    optimizer = torch.optim.SGD(sharded[:1], lr=0.1)
    if way == "unshard":
        model.unshard()
        model[1].unshard()
    elif way == "evaluation":
        with torch.no_grad():
            model(x)
    else:
        loss = model(x).sum()
    gathered = list(model.parameters())
    if way == "freed" and dist.get_world_size() > 1:  # on one rank nothing is gathered, or freed
        assert type(gathered[0]) is FreedParameterProxy
    words = ("SGD", "gathered form of parameter '", "reshard()")
    error_of(lambda: torch.optim.SGD(gathered, lr=0.1), ValueError, *words)
    error_of(lambda: optimizer.add_param_group({"params": gathered[:1]}), ValueError, *words)
    assert [group["params"] for group in optimizer.param_groups] == [sharded[:1]]
    if way in ("forward", "freed"):
        loss.backward()
    for module in (model, model[1]):
        module.reshard()
    torch.optim.SGD(model.parameters(), lr=0.1)  # these are the sharded ones again


@distributed(2)
def test_steps_of_usual_optimizers_have_no_hook() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    from fsdp2.common import torch_patches

    check = "guards.optimizer_checks._check_originals"
    if check in torch_patches._registered:  # by an earlier test
        torch_patches._registered.pop(check).remove()
    before = len(hooks)
    model = sharded_mlp(mlp())
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert check not in torch_patches._registered
    assert len(hooks) == before
