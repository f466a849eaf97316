"""Runs test bodies on every rank of a process group.

A test decorated with `distributed` is a plain function whose body runs on every rank:

    @distributed(2, 4)
    def test_sum() -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()

The ranks of a world size are processes that start once in a pytest session, from a fork server
that has imported torch, and are then used by every test of that world size: a job (module,
function, arguments) goes to each of them through a pipe, and an outcome comes back. A job that
raises on any rank, or does not end in time, leaves a process group that cannot be used again, so
its ranks are killed and the next test gets fresh ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

import fsdp2

# What ranks import before they are forked; the rest is imported by whoever needs it.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
    "pytest",
    "hypothesis",
    "fsdp2.checkpoint",
    "fsdp2.optim",
    "fsdp2.planning",
    "fsdp2.testing",
]
# The device of the tests in this process: "cpu", "testdev" (`pytest --device testdev`, or a test
# that asks for it) or "cuda". Tests on "testdev" take longer: every operator goes through a queue.
DEVICE = os.environ.get("FSDP2_TEST_DEVICE", "cpu")
# With "cuda": how many ranks may share a GPU. More than one are slow, since they take turns.
RANKS_PER_GPU = int(os.environ.get("FSDP2_TEST_RANKS_PER_GPU", "1"))
JOB_TIMEOUT_S = 90.0
SLOW_DEVICE = 3
# Where time is scarce, as on a GPU that is lent: no job has longer, whatever it asks for.
JOB_LIMIT_S = float(os.environ.get("FSDP2_TEST_JOB_S", "inf"))
START_TIMEOUT_S = 120.0
# Process groups that a rank may have before those that nobody needs are destroyed.
MANY_GROUPS = 12
# How long the other ranks may go on after one has failed: they usually wait for it for ever.
_GRACE_S = 2.0

# The suite also runs against torch's own implementation, when a package named `fsdp2` that
# re-exports it comes first on the path. That shows that tests of shared behaviour are fair.
RUNS_ON_TORCH = fsdp2.fully_shard.__module__.startswith("torch.")


def ours_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test of behaviour that torch's implementation does not have."""
    return pytest.mark.skipif(RUNS_ON_TORCH, reason=f"fsdp2 only: {reason}")


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that means something on the CPU only: `pytest --device testdev` skips it."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"on the CPU only: {reason}")


class RankError(AssertionError):
    """A job failed on some rank; the message names the ranks and has their tracebacks."""


@dataclasses.dataclass
class _Outcome:
    """What one rank answers: a value, or the report of what went wrong, or why it skipped."""

    value: Any = None
    error: str | None = None
    skipped: str | None = None


# ---------------------------------------------------------------------------- inside a rank


def _describe_locals(trace: TracebackType | None) -> str:
    """The plain local variables of the last frame that belongs to a test file.

    Tensors are left out: printing one whose storage has been freed would crash.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        if isinstance(value, list | tuple | set):
            return all(map(is_plain, value))
        kinds = (bool, int, float, str, bytes, type(None), torch.dtype)
        return isinstance(value, kinds)

    lines: list[str] = []
    while trace is not None:
        frame = trace.tb_frame
        if Path(frame.f_code.co_filename).name.startswith("test_"):
            lines = [f"{k} = {v!r:.300}" for k, v in frame.f_locals.items() if is_plain(v)]
        trace = trace.tb_next
    return "".join(f"    {line}\n" for line in lines)


def _resolve(module: str, name: str) -> Callable[..., Any]:
    """The function itself where `name` was decorated with `distributed`."""
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return getattr(function, "body", function)


def _reset_state() -> None:
    """Undoes what an earlier job may have changed in this process."""
    torch.set_num_threads(1)
    torch.set_default_device(None if DEVICE == "cpu" else DEVICE)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


# Meshes that the garbage collector does not list any more.
_frozen_meshes: list[weakref.ref[DeviceMesh]] = []


def _meshes() -> list[DeviceMesh]:
    # (Not isinstance: torch 2.12's looks for an attribute of every object.)
    return [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]


def _freeze() -> None:
    """Makes collections look only at what is made from now on.

    Modules that jobs import stay for good. With all that the test files of a session import, a
    collection took 0.3 s, several times what a job takes.
    """
    gc.collect()
    _frozen_meshes.extend(map(weakref.ref, _meshes()))
    gc.freeze()


def _destroy_groups() -> None:
    """Destroys the process groups that a job has made, apart from those of meshes that live on.

    Every gloo group has threads that wake up now and then: hundreds of them slow down the rest.
    """
    if len(c10d._world.pg_map) <= MANY_GROUPS:
        return
    meshes = [*_meshes(), *(mesh for there in _frozen_meshes if (mesh := there()) is not None)]
    kept = {name for mesh in meshes for name in getattr(mesh, "_dim_group_names", ())}
    for module, made in (
        ("comm.transports", "_separate_groups"),
        ("sharding.mesh", "_whole_groups"),
    ):
        groups = getattr(sys.modules.get(f"fsdp2.{module}"), made, {})
        kept |= {group.group_name for group in groups.values()}
    hops = getattr(sys.modules.get("fsdp2.transports.compressed.transports"), "_hop_groups", {})
    kept |= {g.group_name for made in hops.values() for pair in made.values() for g in pair}
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD and group.group_name not in kept:
            dist.destroy_process_group(group)


def _run_job(message: bytes) -> _Outcome:
    num_modules = len(sys.modules)
    try:
        module, name, args, kwargs = pickle.loads(message)
        function = _resolve(module, name)
        _reset_state()
        value = function(*args, **kwargs)
        # A rank that launched a collective more or less than the others is found here, in the
        # test that did it.
        dist.barrier()
        gc.collect()
        _destroy_groups()
        if len(sys.modules) != num_modules:
            _freeze()
        if DEVICE != "cpu":  # which pytest's process does not know
            value = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)
        return _Outcome(value=value)
    except pytest.skip.Exception as skip:
        return _Outcome(skipped=str(skip))
    except BaseException as error:  # pytest.fail raises a BaseException
        report = traceback.format_exc() + _describe_locals(error.__traceback__)
        return _Outcome(error=report)


def _serve(
    rank: int,
    world_size: int,
    folder: str,
    port: int,
    connection: multiprocessing.connection.Connection,
    device: str,
) -> None:
    """The main function of a rank: makes the default group, then runs jobs until the end."""
    globals()["DEVICE"] = device
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(f"{folder}/stacks{rank}", "w")  # noqa: SIM115 (kept for the signal handler)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the ranks
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # (Not a file: ranks look at it every 10 ms only.)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _share_gloo_device()
    if DEVICE == "cuda":
        if RANKS_PER_GPU > 1:
            from benchmarks.ranks import shared_gpu_environment

            os.environ.update(shared_gpu_environment(rank))
        torch.cuda.set_device(rank % torch.cuda.device_count())
        _compute_as_the_cpu_does()
    backend = start_device() if DEVICE != "cpu" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.zeros(1, device=DEVICE))  # of the device: it makes NCCL's communicator
    dist.barrier()
    if not RUNS_ON_TORCH:
        start_accounts()
        start_chaos(rank)
    _freeze()
    connection.send_bytes(pickle.dumps(_Outcome(value="ready")))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        outcome = _run_job(message)
        try:
            answer = pickle.dumps(outcome)
        except Exception:
            answer = pickle.dumps(_Outcome(error=traceback.format_exc()))
        connection.send_bytes(answer)


def _compute_as_the_cpu_does() -> None:
    """A GPU's kernels in full precision and with one result, and the CPU's random numbers."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    draw_on_the_host()


def draw_on_the_host() -> None:
    """From now on a generator of the CPU may draw what is to be on a device.

    CUDA takes no such generator, unlike the test device. Bodies make their batches with one, on
    whatever device they run: as many numbers, the same on all devices.
    """

    def on_the_host(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            generator = kwargs.get("generator")
            if generator is None or generator.device.type != "cpu":
                return plain(*args, **kwargs)
            device = kwargs.pop("device", None) or torch.get_default_device()
            requires_grad = kwargs.pop("requires_grad", False)
            drawn = plain(*args, **kwargs, device="cpu").to(device)
            return drawn.requires_grad_(requires_grad)

        return draw

    for name in ("rand", "randn", "randint", "randperm", "normal"):
        setattr(torch, name, on_the_host(getattr(torch, name)))


def _share_gloo_device() -> None:
    """All gloo groups of this process send and receive on one thread.

    By default each group has a thread of its own that wakes up every 10 ms. The groups of a
    session's meshes live as long as the session, and hundreds of them took a fifth of two cores.
    """
    device = dist.ProcessGroupGloo.create_default_device()

    class SharedDevice(dist.ProcessGroupGloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: Any, **_other: Any
        ) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    dist.ProcessGroupGloo = c10d.ProcessGroupGloo = SharedDevice


def start_device() -> str:
    """Makes the device available; returns the backends that serve it and the CPU."""
    if DEVICE == "cuda":
        return "cpu:gloo,cuda:nccl"
    import testdev

    testdev.start()
    testdev.native().set_delays(seed=int(os.environ.get("FSDP2_TEST_SEED", "0")), **DELAYS)
    return f"cpu:gloo,{testdev.NAME}:{testdev.BACKEND}"


# Tasks of a stream that are late, and by how much at most: enough for another stream to overtake.
DELAYS = {"probability": 0.05, "max_us": 300}

_accounts = contextlib.ExitStack()


def start_chaos(rank: int = 0) -> None:
    """With ``FSDP2_TEST_CHAOS=seed``: what waits for too little gives NaNs from now on."""
    if seed := os.environ.get("FSDP2_TEST_CHAOS"):
        import chaos

        chaos.install(seed=int(seed) + rank)


def start_accounts() -> None:
    """From now on every test fails where a gradient that autograd made does not arrive."""
    from fsdp2.testing import account_gradients

    _accounts.enter_context(account_gradients())


def stop_accounts() -> None:
    """For a test of them, which starts them again."""
    _accounts.close()


@functools.cache
def cached_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh, made once per process: each new mesh costs threads and sockets for good."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A temporary folder for all ranks, which rank 0 makes and removes."""
    made = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    names = [made.name if made is not None else ""]
    dist.broadcast_object_list(names)
    yield names[0]
    dist.barrier()
    if made is not None:
        made.cleanup()


# --------------------------------------------------------------------------- inside pytest


def fork_context() -> multiprocessing.context.ForkServerContext:
    """What starts processes that have torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # Before torch is imported in the fork server: threads of several ranks on a few cores only
    # take turns.
    os.environ["OMP_NUM_THREADS"] = "1"
    return context


class RankPool:
    """The processes of one world size."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp2-ranks-")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._log_starts = [0] * world_size  # where the output of the present job begins
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        context = fork_context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            port = self._store.port
            arguments = (rank, self.world_size, self._folder.name, port, theirs, self.device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._gather(START_TIMEOUT_S, "start of the ranks")

    def run(self, module: str, name: str, args: Any, kwargs: Any, timeout_s: float) -> list[Any]:
        """Runs one job on every rank and returns what each rank returned.

        Raises `RankError` where a rank raised, died or did not end within `timeout_s`. The
        pool must not be used after that.
        """
        if self.device != "cpu":
            timeout_s *= SLOW_DEVICE
        timeout_s = min(timeout_s, JOB_LIMIT_S)
        message = pickle.dumps((module, name, args, kwargs))
        self._log_starts = [self._size_of_log(rank) for rank in range(self.world_size)]
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the rank died: _gather reports it
                connection.send_bytes(message)
        outcomes = self._gather(timeout_s, f"{module}.{name}")
        skipped = [o.skipped for o in outcomes if o.skipped is not None]
        if skipped:
            pytest.skip(skipped[0])
        return [outcome.value for outcome in outcomes]

    def _gather(self, timeout_s: float, what: str) -> list[_Outcome]:
        """Waits for one answer of each rank."""
        outcomes: dict[int, _Outcome] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        failed = False
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([*waiting], left_s)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = self._receive(rank, connection)
                if outcomes[rank].error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failed or waiting:
            raise RankError(self._report(what, outcomes, sorted(waiting.values()), timeout_s))
        return [outcomes[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, connection: multiprocessing.connection.Connection) -> _Outcome:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            return _Outcome(error=f"the process ended with code {code}\n{self._stacks(rank)}")

    def _report(
        self, what: str, outcomes: dict[int, _Outcome], waiting: list[int], timeout_s: float
    ) -> str:
        """The text of a failure: every rank's own, and where the ranks are that never answered."""
        failed: dict[str, list[int]] = {}  # ranks by error: often all of them have the same
        for rank, outcome in sorted(outcomes.items()):
            if outcome.error is not None:
                failed.setdefault(outcome.error, []).append(rank)
        lines = [f"{what} failed on {self.world_size} ranks"]
        for error, ranks in failed.items():
            lines.append(f"--- rank {', '.join(map(str, ranks))}:\n{error}{self._log(ranks[0])}")
        if waiting and not failed:
            for rank in waiting:
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(0.5)  # for the signal handlers to write
            for rank in waiting:
                head = f"--- rank {rank} hangs: no answer in {timeout_s:g} s; its stacks:"
                lines.append(f"{head}\n{self._stacks(rank)}{self._log(rank)}")
        elif waiting:
            lines.append(f"--- ranks {waiting} did not answer after that, and were killed")
        return "\n".join(lines)

    def _stacks(self, rank: int) -> str:
        path = Path(self._folder.name, f"stacks{rank}")
        return path.read_text(errors="replace") if path.exists() else ""

    def _size_of_log(self, rank: int) -> int:
        path = Path(self._folder.name, f"log{rank}")
        return path.stat().st_size if path.exists() else 0

    def _log(self, rank: int) -> str:
        """The end of what a rank printed in this job."""
        path = Path(self._folder.name, f"log{rank}")
        text = path.read_bytes()[self._log_starts[rank] :] if path.exists() else b""
        return f"output of rank {rank}:\n{text[-6000:].decode(errors='replace')}" if text else ""

    def kill(self) -> None:
        """Ends the ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


_pools: dict[tuple[int, str], RankPool] = {}


def run_on(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = JOB_TIMEOUT_S,
    restart: bool = False,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a top-level function on every rank of `world_size` and returns their answers.

    Arguments:
        world_size: number of ranks.
        body: a function that ranks can import by its module and name.
        args, kwargs: its arguments; they are pickled.
        timeout_s: seconds after which the job counts as hanging.
        restart: gives the next job fresh ranks, for a body that breaks the process group.
        device: where `cached_mesh` and tensors made without a device are; None: `DEVICE`.

    Raises:
        RankError: where a rank raised, died or hung.
    """
    module, name = body.__module__, body.__qualname__
    key = world_size, device or DEVICE
    if key[1] == "cuda" and world_size > torch.cuda.device_count() * RANKS_PER_GPU:
        pytest.skip(f"needs {world_size} GPUs, or FSDP2_TEST_RANKS_PER_GPU")
    if key not in _pools:
        _pools[key] = RankPool(*key)
    pool = _pools[key]
    healthy = False
    try:
        result = pool.run(module, name, args, kwargs, timeout_s)
        healthy = not restart
        return result
    finally:
        if not healthy:
            _pools.pop(key).kill()


def stop_all() -> None:
    """Ends all ranks of the session."""
    while _pools:
        _pools.popitem()[1].kill()


def distributed(
    *world_sizes: int,
    long: tuple[int, ...] = (),
    timeout_s: float = JOB_TIMEOUT_S,
    restart: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that runs on every rank, once per world size.

    The function may have parameters that `pytest.mark.parametrize` fills; their values are
    pickled. World sizes in `long` are of the long tests. `timeout_s` and `restart` are those of
    `run_on`.
    """
    sizes = [*world_sizes, *(pytest.param(size, marks=pytest.mark.long) for size in long)]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_on(world_size, body, timeout_s=timeout_s, restart=restart, **kwargs)

        parameter = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = inspect.signature(body).parameters.values()
        functools.update_wrapper(test, body)
        del test.__wrapped__  # pytest would collect and call the body itself
        vars(test)["__signature__"] = inspect.Signature([parameter, *own])
        vars(test)["body"] = body
        marks = list(getattr(body, "pytestmark", []))
        vars(test)["pytestmark"] = marks  # a list of its own: the marks below are not the body's
        return pytest.mark.parametrize("world_size", sizes, ids=_ranks)(test)

    return decorate


def _ranks(world_size: int) -> str:
    return f"{world_size}ranks"
