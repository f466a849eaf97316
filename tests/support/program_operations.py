"""What random programs do to a model beside the steps: settings, weights, optimizers, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from counted import CountedReduceScatter
from fsdp2 import FSDPModule, optim
from fsdp2.checkpoint import Checkpointer, load_model, save_model
from fsdp2.runtime.unit import unit_of
from harness import shared_folder
from program_between import InBetween
from program_pair import Operation, has_one_mesh
from random_models import Node, nodes
from reference import assert_same, assert_same_parameters, average_over_ranks, whole


class CustomGather:
    """An all-gather of the user's."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), torch.nan, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class CustomReduceScatter(CountedReduceScatter):
    """A reduce-scatter of the user's."""

    allocate = CustomGather.allocate


def keep_square(module: nn.Module, args: object) -> None:
    """A hook that computes something from the module's weight."""
    weight = getattr(module, "weight", None)
    if weight is not None and weight.numel():
        vars(module)["square"] = weight.square().mean()


def add_square(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """A hook that adds what `keep_square` computed."""
    square = vars(module).pop("square", None)
    return output if square is None else output + square.to(output.dtype) / 8


class Run(InBetween):
    """Both models in the middle of a program; every method without a ``_`` is an operation."""

    def __init__(
        self,
        model: Node,
        plain: Node,
        optimizer: tuple[str, str] = ("sgd", "plain"),
        *,
        has_comm_policy: bool = False,
    ) -> None:
        super().__init__(model, plain)
        self.has_comm_policy = has_comm_policy
        self.optimizer(*optimizer)

    def optimizer(self, kind: str, wrapped: str) -> None:
        """New ones."""
        makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1),
            # (A large eps: dividing by their own size makes rounding of tiny gradients a step.)
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=0.1),
        }
        wraps: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "plain": lambda o: o,
            "local": optim.local_step,
            "flat": optim.flat_step,
            "offload": lambda o: fsdp2.offload_optimizer(o, min_bytes=0, chunk_bytes=64),
        }
        wrap = wraps[wrapped]
        make = makes[kind]
        self.zero()
        self.free()
        self.make_ours = lambda: wrap(make(self.model.parameters()))
        self.optimizers = [make(self.plain.parameters()), self.make_ours()]

    def look(self, kind: str) -> None:
        """Weights are read."""
        full = kind == "whole"
        found = fsdp2.full_state_dict(self.model) if full else self.model.state_dict()
        if full and dist.get_rank():
            return  # rank 0 has them
        for name, value in self.plain.state_dict().items():
            if name in dict(self.plain.named_parameters()):
                assert_same(found[name] if full else whole(found[name]), value, name)

    def observe(self, what: Operation) -> None:
        """A step under a profile, perhaps with more, and what it says of the model."""
        with fsdp2.profile(self.model) as profile:
            self.do(what)
            self.step("reduce")
        assert str(profile)
        assert str(fsdp2.explain(self.model))

    def resume(self) -> None:
        """Model and optimizer go to a checkpoint, and come back into a new optimizer."""
        model, old = self.model, self.optimizers[1]
        self.free()
        with shared_folder() as folder, Checkpointer(folder) as checkpointer:
            checkpointer.save(1, model=model, optimizer=old).wait()
            dist.barrier()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            self.optimizers[1] = self.make_ours()
            checkpointer.load(model=model, optimizer=self.optimizers[1], random_state=False)
        assert_same_parameters(model, self.plain)
        self.step("reduce")

    def freeze(self, number: int) -> None:
        """A parameter is frozen, or thawed."""
        for each in self.both():
            parameters = list(each.parameters())
            if parameters:
                chosen = parameters[number % len(parameters)]
                chosen.requires_grad_(not chosen.requires_grad)

    def state_dict(self, kind: str) -> None:
        """Weights go out, are overwritten, and come back."""
        model = self.model
        full = kind == "whole"
        state = fsdp2.full_state_dict(model) if full else model.state_dict()
        state = {name: value.clone() for name, value in state.items()}
        with shared_folder() as folder:
            if kind == "files":
                save_model(model, f"{folder}/model").wait()
                dist.barrier()
            with self.sharded_shown(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            if kind == "files":
                load_model(model, f"{folder}/model")
            elif full:
                fsdp2.load_full_state_dict(model, state)
            else:
                # (What is assigned is put into the parameters that optimizers hold.)
                model.load_state_dict(state, assign=kind == "assigned")
        if kind in ("whole", "files"):
            for buffer in self.plain.buffers():
                dist.broadcast(buffer, 0)  # whose buffers it had
        with self.sharded_shown():
            assert_same_parameters(model, self.plain, bitwise=False)

    def replaced(self, number: int) -> None:
        """Another parameter is put in the place of one: it computes until that is undone."""
        self.free()
        self.step("reduce")
        self.free()
        names = [name for name, _ in self.plain.named_parameters(remove_duplicate=False)]
        path, _, own_name = names[number % len(names)].rpartition(".")
        modules = [each.get_submodule(path) for each in self.both()]
        there = [getattr(module, own_name) for module in modules]
        for module, param in zip(modules, there, strict=True):
            setattr(module, own_name, torch.nn.Parameter(param.detach() * 2, param.requires_grad))
        with torch.no_grad():
            for _ in range(2):  # of which one has the layers that are skipped in the other
                self.forward(*self.batch())
        for module, param in zip(modules, there, strict=True):
            setattr(module, own_name, param)
        self.step("reduce")

    def copy(self) -> None:
        """A deep copy takes its place."""
        self.model = copy.deepcopy(self.model)
        self.optimizer("sgd", "plain")

    def setting(self, method: str, value: Any) -> None:
        """Of all units."""
        if method == "set_keep_unsharded_storage":
            if self.limited:
                return  # either, or
            self.keeps_storage = value
        getattr(self.model, method)(value)
        if method == "set_reshard_after_backward":
            self.keeps = not value

    def node_setting(self, number: int, method: str, value: Any) -> None:
        """Of one unit."""
        node = self.node(number, units=True)[1]
        if isinstance(node, FSDPModule):
            getattr(node, method)(value)

    def prefetch(self, number: int, method: str, *others: int) -> None:
        """What a unit gathers when its forward or backward begins, chosen by hand."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        chosen = [units[other % len(units)] for other in others]
        getattr(units[number % len(units)], method)(chosen)

    def lookup(self, number: int) -> None:
        """A unit whose backward reads no weights is not gathered for it."""
        node = self.node(number, units=True)[1]
        reads_none = node.own.kind in ("table", "empty", "nothing")
        if isinstance(node, FSDPModule) and reads_none and not list(node.parts()):
            node.set_unshard_in_backward(False)
        self.step("reduce")

    def forward_hook(self, number: int) -> None:
        """The user adds hooks that compute with the weight of a module."""
        for node in self.node(number):
            owner: Any = getattr(node.own, "table", node.own)
            owner.register_forward_pre_hook(keep_square)
            owner.register_forward_hook(add_square)

    def custom(self, number: int, gathers: bool, reduces: bool) -> None:
        """A unit communicates by functions of the user's."""
        node = self.node(number, units=True)[1]
        if not isinstance(node, FSDPModule) or self.has_comm_policy or not has_one_mesh(node):
            return
        if gathers:
            node.set_custom_all_gather(CustomGather())
        if reduces:
            node.set_custom_reduce_scatter(CustomReduceScatter())

    def comm_policy(self, number: int, policy: Any) -> None:
        """A unit sends in another format, or in full, where results are rounded anyway."""
        node = self.node(number, units=True)[1]
        if isinstance(node, FSDPModule) and self.has_comm_policy:
            node.set_comm_policy(policy)

    def merge(self, min_bytes: int) -> None:
        self.step("reduce")  # not between a forward and a backward that never comes
        fsdp2.merge_units(self.model, min_bytes=min_bytes)

    def gather(self, number: int, frees: bool) -> None:
        """By hand, as whoever looks at whole weights does."""
        node = self.node(number)[1]
        if isinstance(node, FSDPModule):
            node.unshard()
            if frees:
                node.reshard()
        if not frees:
            self.evaluate("no_grad")
            self.free()

    def functional(self, kind: str = "whole", every: int = 1) -> None:
        """One forward with other weights, perhaps with a backward to them.

        Args:
            every: which parameters have others: each, or each second one.
        """
        owns = [node.own for node in [*nodes(self.plain), self.plain]]
        if len({*owns}) < len(owns):
            return  # torch leaves the other weights in a module with two names, also in plain ones
        trained = kind == "trained"
        if unit_of(self.model).runtime is None:
            self.free()  # or the first forward of the whole model would refuse this
        batch = self.batch()
        outputs, given = [], []
        # (What was frozen while gathered, shards are told in the next forward.)
        trains = {name: p.requires_grad for name, p in self.plain.named_parameters()}
        for each in self.both():
            # Shards on all ranks, or only some would take part in making them whole: a rank need
            # not have gathered what it has not used.
            with self.sharded_shown(), torch.no_grad():
                named = dict(list(each.named_parameters())[::every])
                others = {n: (p if trained else whole(p)) * 0.9 for n, p in named.items()}
            for name, other in others.items():
                other.requires_grad_(trained and trains[name])
            given.append(others)
            with torch.set_grad_enabled(trained):
                outputs.append(torch.func.functional_call(each, others, batch))
        assert_same(outputs[1], outputs[0], "output of other weights")
        if not outputs[0].requires_grad:
            return
        for output in outputs:
            output.square().mean().backward()
        for name, other in given[0].items():
            mine = given[1][name].grad
            assert (mine is None) == (other.grad is None)
            if mine is not None and other.grad is not None:
                assert_same(mine, average_over_ranks(other.grad), f"gradient of given {name}")

    def change(self, number: int, how: str = "freed") -> None:
        """The user writes into a sharded parameter: while all units are freed, or whatever is
        gathered, by an operator on the DTensor or into the rows of each rank."""
        if how == "freed":
            self.free()
        with self.sharded_shown(), torch.no_grad():
            for each in self.both():
                parameters = list(each.parameters())
                if parameters:
                    chosen = parameters[number % len(parameters)]
                    rows = getattr(chosen, "_local_tensor", chosen)
                    (rows if how == "rows" else chosen).mul_(0.5)

    def cast(self) -> None:
        """To a narrower dtype and back."""
        self.zero()
        for each in self.both():
            each.float()
            each.double()
        self.optimizer("sgd", "plain")

    def move(self) -> None:
        """Elsewhere in memory, as to another device; then a move that moves nothing."""
        for each in self.both():
            each._apply(torch.clone)
            each.to("cpu")
