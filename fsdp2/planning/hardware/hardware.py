"""Hardware presets: speeds of GPUs and of the links within and between nodes.

The presets' numbers are from data sheets and published measurements, named next to each number.
They were written down from memory, without access to the sources. Efficiencies are the fraction of
a data sheet's number that large kernels reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ...common.suggestions import did_you_mean
from .curves import Points, checked, is_number, is_tables

GB = 1e9
MIB, GIB = 2**20, 2**30
# Fields that need not be positive.
_MAY_BE_0 = (
    *("context_bytes", "workspace_bytes", "channel_bytes", "caches_memory"),
    *("multiprocessors", "launch_s", "call_host_s", "jitter"),
    *("half_intensity", "overlap", "disk_write_bandwidth", "disk_read_bandwidth"),
    *("message_s", "param_s", "host_ordered", "optimizer_launch_s"),
    *("recompute_s", "nodes_per_pod", "rail_optimized"),
)
_RANGES = ("kernels_range", "links_range")
# The parts of a step that `Hardware.step_factors` may have.
MULTIPLY, OPERANDS = "multiply", "operands"
CONVOLVE, ATTEND, MOVE = "convolve", "attend", "move"
HOST, CALL, GATHER, REDUCE, OPTIMIZER = "host", "call", "gather", "reduce", "optimizer"
STEP_PARTS = (MULTIPLY, OPERANDS, CONVOLVE, ATTEND, MOVE, HOST, CALL, GATHER, REDUCE, OPTIMIZER)
# The form of the keys of each table: a key that nothing looks up would be ignored.
_OPERATOR = r"(attention|\w+::\w+) (\w+)"
_TABLES = {
    "operator_s": (_OPERATOR, "'aten::gelu float32'"),
    "operator_flops": (_OPERATOR, "'aten::mm float32'"),
    "collective_s": (
        r"(all_gather|reduce_scatter|all_reduce) [1-9]\d*( on [1-9]\d*)?",
        "'all_gather 8' or 'all_reduce 16 on 2'",
    ),
}
MAX_FILE_BYTES = 1_000_000  # of a file of hardware


def _check_keys(name: str, table: Mapping[str, Points]) -> None:
    form, example = _TABLES[name]
    for key in table:
        match = re.fullmatch(form, key)
        dtype = match and form is _OPERATOR and vars(torch).get(match[2])
        if match is None or (form is _OPERATOR and not isinstance(dtype, torch.dtype)):
            raise ValueError(f"{name}: '{key}' has to be like {example}")


def _check_factors(factors: Mapping[str, float]) -> None:
    for part, factor in factors.items():
        if part not in STEP_PARTS:
            hint = did_you_mean(part, STEP_PARTS)
            raise ValueError(f"step_factors: there is no part '{part}'{hint}")
        if not (factor > 0 and isfinite(factor)):
            raise ValueError(f"step_factors['{part}'] must be positive and finite, got {factor}")


def _check_spine(hardware: Hardware) -> None:
    more = hardware.oversubscription
    if not 1 <= more < 1e6:
        raise ValueError(f"oversubscription must be 1 or more, got {more}")
    if more > 1 and not (hardware.nodes_per_pod or hardware.rail_optimized):
        raise ValueError(
            "oversubscription needs pods or rails: give nodes_per_pod, or rail_optimized"
        )


@dataclass(frozen=True)
class Hardware:
    """A cluster of nodes with equally many ranks.

    Attributes:
        name: display name.
        memory_bytes: memory of one GPU.
        matmul_flops: FLOP/s of large dense matrix multiplications by dtype, from the data sheet. A
            missing dtype gets the value of another one, and the plan has a note about it.
        matmul_efficiency: the fraction of ``matmul_flops`` that large multiplications reach.
        attention_flops: FLOP/s that fused attention kernels reach, forward and backward.
        memory_bandwidth: bytes per second of the GPU's memory, from the data sheet.
        memory_efficiency: the fraction of it that streaming kernels reach.
        kernel_s: the minimum seconds between the starts of two kernels.
        ranks_per_node: GPUs in a node.
        node_bandwidth: bytes per second that a GPU sends to other GPUs of its node in a ring.
        network_bandwidth: bytes per second that a node sends to other nodes.
        network_efficiency: the fraction of it that collectives reach.
        nodes_per_pod: nodes of a pod, which reach each other with the full ``network_bandwidth``;
            0: all nodes do. Nodes are numbered pod by pod. Traffic to other pods passes the spine.
        oversubscription: bandwidth of the nodes of a pod, divided by the bandwidth of the pod's
            links to the spine.
        rail_optimized: whether the network cards with the same local rank, on all nodes of a pod,
            share a switch (a rail), and rails meet in the spine. Rings stay on their rails.
            All-to-alls with several ranks of a node do not.
        node_latency_s, network_latency_s: latency of one ring step of a message.
        call_latency_s: fixed latency of a call, for any number of messages.
        channels: number of messages of a call that use their rings at the same time.
        host_bandwidth: bytes per second between a GPU and host memory.
        multiprocessors: number of a GPU's multiprocessors. A collective takes ``channels`` of them
            from kernels that run at the same time; 0: it takes none.
        launch_s: host seconds per operator of the model.
        call_host_s: host seconds per call of a collective, including hooks.
        jitter: relative standard deviation of a rank's time for a second of kernels. All ranks wait
            for the slowest: see ``stragglers_s`` in ``simulation/costs.py``.
        context_bytes: bytes of ``memory_bytes`` that the driver and the CUDA context hold.
        workspace_bytes: scratch memory that cuBLAS keeps.
        channel_bytes: buffers of NCCL for each channel of a communicator.
        caches_memory: whether torch's caching allocator allocates tensors.
        speeds: the speed of each node, or of each rank, if they differ, as a fraction of the
            kernels' speed above. Empty: all are 1. ``fsdp2 doctor`` measures them.
        device_type: the device whose kernels run: "cuda" or "cpu".
        kernels_range, links_range: the slowest and fastest relative speeds of kernels and links in
            practice, such as 0.6 and 1.1, if the speeds above are uncertain. Predictions print the
            resulting range of a step's time. (1, 1): the speeds are known.
        half_intensity: the FLOP per byte at which a multiplication reaches half of the FLOP/s of
            large ones; at intensity ``AI``, it reaches ``AI / (AI + half_intensity)``. 0: each
            reaches the full FLOP/s, or the speed of memory.
        operator_s: measured times by operator and dtype ("aten::gelu float32"): pairs of bytes that
            a call reads and writes, and seconds. Other operators are like "aten::add".
        operator_flops: measured rates by operator and dtype: pairs of arithmetic intensity (FLOP
            per byte) and FLOP/s. Other operators are like "aten::mm".
        collective_s: measured times by kind and number of ranks, on one node ("all_gather 8") or on
            several ("all_gather 16 on 2"): pairs of bytes of the whole data, and seconds. Other
            groups are modelled as rings.
        message_s, param_s: seconds of each further message of a measured collective, and of each
            further parameter of its unit.
        host_ordered: whether the host does everything in order, without streams, as with gloo on
            the CPU.
        optimizer_launch_s: if ``host_ordered``, host seconds per operator of an optimizer in
            addition to the operator, because its parameters are DTensors. 0: ``launch_s``.
        recompute_s: if ``host_ordered``, additional host seconds for an operator that activation
            checkpointing repeats, including its bookkeeping in forward.
        overlap: if ``host_ordered``, the fraction of a collective that overlaps with compute.
        disk_write_bandwidth, disk_read_bandwidth: bytes per second of a rank to the folder of
            checkpoints while all ranks write or read; 0: not known.
        step_factors: for parts of a step, their time within a step divided by their time measured
            alone. The parts are: of multiplications, the time of their FLOPs at the highest rate
            ("multiply") and the rest ("operands"); other operators ("convolve", "attend", "move");
            the "host" (``launch_s``, ``recompute_s``, and ``kernel_s`` if ``host_ordered``); of
            measured collectives, the time of the smallest ("call") and the rest ("gather",
            "reduce"); and the operators of the "optimizer". Missing parts have the factor 1.
        source: the source of the numbers.

    Raises:
        ValueError: for numbers that are not positive, speeds that are not finite, and ranges
            without 1.

    Example:
        >>> ours = replace(find_hardware("h100"), network_bandwidth=100e9, name="ours")
        >>> ours = replace(ours, speeds=[1.0, 1.0, 0.5, 1.0])  # the third of four nodes is slow
    """

    name: str
    memory_bytes: float
    matmul_flops: Mapping[torch.dtype, float]
    matmul_efficiency: float
    attention_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    memory_efficiency: float = 0.85
    kernel_s: float = 5e-6
    ranks_per_node: int = 8
    network_efficiency: float = 0.8
    node_latency_s: float = 3.4e-6
    network_latency_s: float = 14e-6
    call_latency_s: float = 8.4e-6
    channels: int = 16
    host_bandwidth: float = 25 * GB
    multiprocessors: int = 132
    launch_s: float = 5e-6
    call_host_s: float = 50e-6
    jitter: float = 0.05
    context_bytes: float = 1.5 * GB
    workspace_bytes: float = 64 * MIB
    channel_bytes: float = 18.4 * MIB
    caches_memory: bool = True
    speeds: Sequence[float] = ()
    device_type: str = "cuda"
    kernels_range: tuple[float, float] = (1.0, 1.0)
    links_range: tuple[float, float] = (1.0, 1.0)
    source: str = field(default="", compare=False)
    half_intensity: float = 0.0
    operator_s: Mapping[str, Points] = field(default_factory=dict)
    operator_flops: Mapping[str, Points] = field(default_factory=dict)
    collective_s: Mapping[str, Points] = field(default_factory=dict)
    message_s: float = 0.0
    param_s: float = 0.0
    optimizer_launch_s: float = 0.0
    recompute_s: float = 0.0
    host_ordered: bool = False
    overlap: float = 0.0
    disk_write_bandwidth: float = 0.0
    disk_read_bandwidth: float = 0.0
    step_factors: Mapping[str, float] = field(default_factory=dict)
    nodes_per_pod: int = 0
    oversubscription: float = 1.0
    rail_optimized: bool = False

    def __post_init__(self) -> None:
        try:
            self._check_numbers()
            _check_spine(self)
            for name in _TABLES:
                object.__setattr__(self, name, checked(name, getattr(self, name)))
                _check_keys(name, getattr(self, name))
            _check_factors(self.step_factors)
            self._check_speeds()
        except ValueError as error:
            raise ValueError(f"Hardware '{self.name}': {error}") from None

    def _check_numbers(self) -> None:
        numbers = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        for name in _MAY_BE_0:
            value = numbers.pop(name)
            if not (value >= 0 and isfinite(value)):
                raise ValueError(f"{name} must not be negative, got {value}")
        numbers |= {f"matmul_flops[{k}]": v for k, v in self.matmul_flops.items()}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.overlap > 1:
            raise ValueError(f"overlap is a part, got {self.overlap}")

    def _check_speeds(self) -> None:
        object.__setattr__(self, "speeds", tuple(map(float, self.speeds)))  # hashable
        for i, speed in enumerate(self.speeds):
            if not (speed > 0 and isfinite(speed)):
                raise ValueError(f"speeds[{i}] must be positive and finite, got {speed}")
        for name in _RANGES:
            low_high = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, low_high)
            if len(low_high) != 2 or not (0 < low_high[0] <= 1 <= low_high[1] < 1e3):
                raise ValueError(
                    f"{name} must be two relative speeds with 1 between them, got {list(low_high)}"
                )

    def step_factor(self, part: str) -> float:
        """The factor of one of ``STEP_PARTS``."""
        return self.step_factors.get(part, 1.0)

    def library_bytes(self, communicators: int) -> int:
        """Memory of a GPU that CUDA, cuBLAS and NCCL hold, outside torch's allocator."""
        nccl = communicators * self.channels * self.channel_bytes
        return int(self.context_bytes + self.workspace_bytes + nccl)

    @property
    def taken_by_collectives(self) -> float:
        """The fraction of a GPU's multiprocessors on which a collective runs."""
        if not self.multiprocessors:
            return 0.0
        return min(0.9, self.channels / self.multiprocessors)

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s that large multiplications in ``dtype`` reach."""
        return self.matmul_flops[self.rate_of(dtype)] * self.matmul_efficiency

    def rate_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype whose FLOP/s apply to multiplications in ``dtype``: ``dtype``, if they are
        known; bfloat16 instead of narrower ones; otherwise the slowest."""
        known = self.matmul_flops
        if dtype in known:
            return dtype
        if dtype.itemsize == 1 and torch.bfloat16 in known:
            return torch.bfloat16
        return min(known, key=lambda each: known[each])


# Efficiency of multiplications: one number per type of GPU, for all losses of a real step against
# the data sheet (shapes, power limits). A100: calibrated on one
# published figure, GPT-175B with two sequences per GPU (FSDP paper, section 5.4: 186 TFLOPS). H100:
# the same fraction of the achievable speed, which S. Bekman, Machine Learning Engineering, measured
# as 267.9 of 312 TFLOPS (A100 SXM) and 794.5 of 989 (H100 SXM): 0.735 / 0.86 * 0.80 = 0.68. H100
# limited to 500 W: calibrated on one row of torchtitan. docs/planning/accuracy.md has the others.
# Ranges of kernels: published training runs on H100s reached 0.45 to 0.55 of the data sheet with
# software of 2023, compiled ones of 2026 reach 0.7; on A100s models of width 768 reached 0.51, and
# of width 7168 0.71. B200 and MI300X: 0.7 to 1.1 is a guess, as nothing is calibrated. Links: the
# range of 0.75 to 1.1 for large collectives is a guess, too.
# Attention: FlashAttention-2 (arXiv 2307.08691), forward and backward, head width 128: up to about
# 190 TFLOPS on A100 and 335 on H100.
# Latencies: NCCL, src/graph/tuning.cc, rings with the Simple protocol: 3.4 us per step over NVLink,
# 14 us over the network, 8.4 us per call.
# Channels: NCCL's log (NCCL_DEBUG=INFO) has 16 to 24 per communicator on nodes of 8 A100 or H100.
# Memory of libraries. Context: of the 80 GiB of an H100, CUDA reports 79.1 (the total of
# torch.cuda.mem_get_info); a process with one tensor holds about 0.5 GB. cuBLAS: torch's default on
# Hopper is 32 MiB, and as much for cuBLASLt; less before. NCCL: a connection has buffers of 4 MiB
# (NCCL_BUFFSIZE), 4.7 MiB (LL128) and 0.5 MiB (LL), and a ring has one to receive and one to send
# per channel. All this is of the right order, but was not measured on any cluster.
# Multiprocessors: 108 of an A100, 132 of an H100 (data sheets); a kernel of NCCL has a block on one
# of them for each channel, and other kernels are assumed to lose this share of their speed.
# Host: PyTorch launches 100,000 to 300,000 small kernels per second (its performance notes and
# many profiles); the hooks of a unit and a call of a collective take 30 to 100 us together. Both
# matter for small batches only. Jitter: chosen to match one published row, torchtitan's Llama 3 8B
# on 128 GPUs, which are 2.7 % slower than 8; see `costs.stragglers_s`.
# Networks of presets are flat. Others: pods of 3,072 GPUs (384 nodes), between which bandwidth is a
# seventh (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.1); rails, with scalable units
# of 32 nodes and as much bandwidth in the spine (NVIDIA DGX SuperPOD reference architecture, H100).
# NVLink: bus bandwidth of all-gathers in nccl-tests: about 230 GB/s of 300 (A100) and 360 GB/s of
# 450 (H100).
def _dense(fp8: float, bf16: float, tf32: float) -> dict[torch.dtype, float]:
    """FLOP/s of dense multiplications in these formats."""
    return {
        **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), fp8),
        **dict.fromkeys((torch.bfloat16, torch.float16), bf16),
        torch.float32: tf32,
    }


_A100 = Hardware(
    name="a100-80",
    memory_bytes=80 * GIB,
    # NVIDIA A100 data sheet: 312 TFLOPS dense bf16, 156 TF32, 2,039 GB/s (80 GB SXM).
    matmul_flops={torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 156e12},
    matmul_efficiency=0.735,
    attention_flops=190e12,
    memory_bandwidth=2039 * GB,
    node_bandwidth=230 * GB,
    network_bandwidth=200 * GB,  # DGX A100: 8 HDR ports of 200 Gb/s for computing
    host_bandwidth=25 * GB,  # PCIe 4
    multiprocessors=108,
    kernels_range=(0.7, 1.0),
    links_range=(0.75, 1.1),
)
_H100 = Hardware(
    name="h100",
    memory_bytes=80 * GIB,
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS dense FP8, 989 bf16, 494 TF32, 3.35 TB/s.
    matmul_flops=_dense(1979e12, 989e12, 494e12),
    matmul_efficiency=0.68,
    attention_flops=335e12,
    memory_bandwidth=3350 * GB,
    node_bandwidth=360 * GB,
    network_bandwidth=400 * GB,  # DGX H100: 8 NDR ports of 400 Gb/s
    host_bandwidth=50 * GB,  # PCIe 5
    kernels_range=(0.66, 1.03),
    links_range=(0.75, 1.1),
)
_B200 = replace(
    _H100,
    name="b200",
    memory_bytes=180 * GB,
    matmul_flops=_dense(4500e12, 2250e12, 1125e12),
    matmul_efficiency=0.66,
    attention_flops=760e12,
    memory_bandwidth=8000 * GB,
    node_bandwidth=720 * GB,
    multiprocessors=148,
    kernels_range=(0.7, 1.1),
)

PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _A100,
        # The 40 GB version of the data sheet: HBM2 with 1,555 GB/s.
        replace(_A100, name="a100-40", memory_bytes=40 * GIB, memory_bandwidth=1555 * GB),
        # FSDP paper (arXiv 2304.11277), section 5: 80 GB A100s connected by a 2 Tb/s RoCE network.
        replace(_A100, name="a100-fsdp-paper", network_bandwidth=250 * GB),
        _H100,
        # NVIDIA H200 data sheet: the compute of an H100, 141 GB with 4.8 TB/s.
        replace(_H100, name="h200", memory_bytes=141 * GB, memory_bandwidth=4800 * GB),
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e with 2.4 TB/s, limit
        # of 500 W, 400 Gb/s per GPU. Efficiency: calibrated on its table 1, FSDP, so it is known.
        replace(
            _H100,
            name="h100-torchtitan",
            kernels_range=(1.0, 1.0),
            memory_bytes=95 * GIB,
            matmul_efficiency=0.529,
            memory_bandwidth=2400 * GB,
        ),
        # NVIDIA DGX B200 data sheet: 72 PFLOPS FP8 with sparsity of 8, so 4,500 TFLOPS dense each,
        # 2,250 bf16; 1,440 GB with 64 TB/s of 8; 8 ports of 400 Gb/s; 148 multiprocessors. NVLink
        # 5: 900 GB/s each way; collectives are assumed to reach the same part as on an H100.
        # Efficiency: S. Bekman (see above) measured about 0.78 of the data sheet at best, 0.80 on
        # an H100. Attention: the same fraction of the data sheet as on an H100. Not calibrated.
        _B200,
        # NVIDIA GB200 NVL72 data sheet: 2,500 TFLOPS dense bf16, 13.4 TB with 576 TB/s of 72 GPUs,
        # which NVLink connects; 400 Gb/s of network per GPU; C2C 450 GB/s each way.
        replace(
            _B200,
            name="gb200",
            memory_bytes=186 * GB,
            matmul_flops={k: v * 2500 / 2250 for k, v in _B200.matmul_flops.items()},
            attention_flops=840e12,
            ranks_per_node=72,
            network_bandwidth=72 * 50 * GB,
            host_bandwidth=360 * GB,
        ),
        # AMD Instinct MI300X data sheet: 1,307 TFLOPS dense bf16, 2,615 FP8, 654 TF32; 192 GB with
        # 5.3 TB/s; 304 compute units; 7 links of 64 GB/s each way; rings are assumed to reach 0.7
        # of them. Efficiency: S. Bekman measured 0.5 to 0.6 of the data sheet at best, 0.80 on an
        # H100. Nothing is calibrated, and nothing of this package has run on ROCm.
        replace(
            _H100,
            name="mi300x",
            memory_bytes=192 * GB,
            matmul_flops=_dense(2615e12, 1307e12, 654e12),
            matmul_efficiency=0.47,
            attention_flops=300e12,
            memory_bandwidth=5300 * GB,
            node_bandwidth=310 * GB,
            multiprocessors=304,
            kernels_range=(0.7, 1.1),
        ),
        # Two cores and gloo, for trials: the order of magnitude, as measured on one machine. Gloo
        # has no channels; 15 more messages took 0.4 to 0.7 ms longer.
        Hardware(
            name="cpu",
            memory_bytes=16 * GIB,
            matmul_flops={torch.float32: 60e9, torch.bfloat16: 60e9},
            matmul_efficiency=0.8,
            attention_flops=20e9,
            memory_bandwidth=10 * GB,
            node_bandwidth=3 * GB,
            network_bandwidth=1 * GB,
            kernel_s=10e-6,
            ranks_per_node=2,
            node_latency_s=50e-6,
            network_latency_s=50e-6,
            channels=1,
            multiprocessors=0,
            launch_s=0,
            call_host_s=0,
            jitter=0,
            context_bytes=0,
            workspace_bytes=0,
            channel_bytes=0,
            caches_memory=False,
            device_type="cpu",
        ),
    )
}


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Look up a preset by name, or read a file; a `Hardware` is returned unchanged.

    The name of a file ends in ``.json``. The file holds an object with the name of a preset as
    "base", and the fields of `Hardware` that differ from it:
    ``{"base": "h100", "network_bandwidth": 100e9, "speeds": [1, 1, 0.5]}``. ``matmul_flops`` has
    names of dtypes as keys. `measure` writes such files with all fields; "measured" has the time
    and place of the measurement.

    Raises:
        ValueError: for an unknown name, or invalid contents of a file.
        OSError: for a file that cannot be read.
        TypeError: for other types.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"hardware must be a name or a Hardware, got {hardware!r}")
    if hardware.endswith(".json"):
        return _read(Path(hardware))
    if hardware not in PRESETS:
        known = ", ".join(f"'{name}'" for name in PRESETS)
        hint = did_you_mean(hardware, PRESETS)
        raise ValueError(
            f"There is no hardware {hardware!r}: choose one of {known}, a file that ends in "
            f".json, or pass a Hardware{hint}"
        )
    return PRESETS[hardware]


def _read(path: Path) -> Hardware:
    if not path.is_file() and path.exists():  # opening a pipe would block
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        told: Any = json.loads(text, object_pairs_hook=_each_once)
    except _TwiceError as error:
        raise ValueError(f"{path} has '{error}' twice: keep the one that is meant") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} has to hold one object with fields of Hardware")
    told = {"name": path.stem, **told}
    base = told.pop("base", None)
    told.pop("measured", None)  # when, where, by what: for people
    types = {each.name: str(each.type) for each in fields(Hardware)}
    for key, value in told.items():
        if key not in types:
            raise ValueError(f"{path}: there is no field '{key}'{did_you_mean(key, types)}")
        what, fits = _KINDS[types[key]]
        if not fits(value):
            raise ValueError(f"{path}: {key} has to be {what}, got {value!r}")
    if "matmul_flops" in told:
        # Not `getattr`: torch imports some of its modules on access.
        dtypes = {name: vars(torch).get(name) for name in told["matmul_flops"]}
        for name, dtype in dtypes.items():
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{path}: matmul_flops: there is no dtype '{name}'")
        told["matmul_flops"] = {dtypes[name]: v for name, v in told["matmul_flops"].items()}
    if base is not None:
        if not isinstance(base, str) or base.endswith(".json"):  # a file could name itself
            raise ValueError(f"{path}: base has to be the name of a preset, got {base!r}")
        if base not in PRESETS:
            raise ValueError(
                f"{path}: base: there is no preset '{base}'{did_you_mean(base, PRESETS)}"
            )
        return _made(path, replace, PRESETS[base], told)
    if missing := _REQUIRED - told.keys():
        raise ValueError(
            f'{path} has no {", ".join(sorted(missing))}; a preset as "base" would give them'
        )
    return _made(path, Hardware, None, told)


class _TwiceError(Exception):
    """A duplicate key in an object of a file; JSON silently uses the last one."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _TwiceError(key)
        made[key] = value
    return made


def _made(path: Path, make: Any, base: Hardware | None, told: Mapping[str, Any]) -> Hardware:
    try:
        return make(**told) if base is None else make(base, **told)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


_REQUIRED = {
    each.name
    for each in fields(Hardware)
    if each.default is MISSING and each.default_factory is MISSING
}


# The values that a file may have in a field, by its type.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and is_number(value)),
    "float": ("a number", is_number),
    "Sequence[float]": (
        "a list of numbers",
        lambda value: isinstance(value, list) and all(map(is_number, value)),
    ),
    "tuple[float, float]": (
        "a list of two numbers",
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)),
    ),
    "Mapping[torch.dtype, float]": (
        "an object with a number for each dtype",
        lambda value: isinstance(value, dict) and value != {} and _holds_numbers(value),
    ),
    "Mapping[str, float]": (
        "an object with a number for each part of a step",
        lambda value: isinstance(value, dict) and _holds_numbers(value),
    ),
    "Mapping[str, Points]": ("an object of lists of pairs of numbers", is_tables),
}


def _holds_numbers(value: Mapping[str, Any]) -> bool:
    return all(map(is_number, value.values()))
