"""What a rank can find out about itself and its host, without asking another rank."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..common.host import address_of_interface, boot_id, memory_bytes, num_cores
from ..common.versions import __version__

# Settings that change what ranks send to each other, or how.
_SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FSDP2_", "RCCL_", "UCX_", "FI_")
# Of these, the settings that naturally differ between hosts.
_OF_HOSTS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE")


@dataclass(frozen=True)
class Facts:
    """One rank and the host that it runs on; bytes and seconds.

    Attributes:
        host: the name of the host; ``boot`` distinguishes hosts of the same name.
        address: the address that gloo gives to other ranks: of ``GLOO_SOCKET_IFNAME``, or of the
            host name; "" if the name cannot be resolved.
        device, device_id: name of the rank's accelerator ("" on the CPU), and its identity.
        num_devices: accelerators that this rank sees.
        device_used, device_bytes: memory of it in use (by any process), and in total.
        threads: torch's threads for one operator.
        open_files, locked_bytes: limits of the process; -1: none.
        shm_bytes: free space in ``/dev/shm``, through which ranks of a host share memory.
        settings: environment variables that must be the same on all ranks.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    boot: str
    pid: int
    address: str
    fsdp2: str
    torch: str
    python: str
    nccl: str
    device: str
    device_id: str
    num_devices: int
    device_used: int
    device_bytes: int
    cores: int
    threads: int
    memory_free: int
    memory_bytes: int
    open_files: int
    locked_bytes: int
    shm_bytes: int
    settings: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Facts:
        """Read the output of `to_dict`, perhaps of another version of this class."""
        nothing = {"int": 0, "str": "", "dict[str, str]": {}}
        values = {f.name: found.get(f.name, nothing[str(f.type)]) for f in fields(cls)}
        return cls(**values)

    @property
    def on(self) -> str:
        """The host, as one word."""
        return f"{self.host}/{self.boot}"


def facts_of(rank: int, world_size: int, local_rank: int) -> Facts:
    """Gather the facts of this process."""
    total, free = memory_bytes()
    name, identity, count, used, size = _device(local_rank)
    return Facts(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        host=socket.gethostname(),
        boot=_boot(),
        pid=os.getpid(),
        address=_address(),
        fsdp2=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=_nccl(),
        device=name,
        device_id=identity,
        num_devices=count,
        device_used=used,
        device_bytes=size,
        cores=num_cores(),
        threads=torch.get_num_threads(),
        memory_free=free,
        memory_bytes=total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=_free_bytes("/dev/shm"),
        settings={
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(_SHARED_PREFIXES) and key not in _OF_HOSTS
        },
    )


def _boot() -> str:
    """An identity that differs between hosts of the same name: containers, or cloned images."""
    identity = boot_id()[:8]
    # Containers of one machine share its boot. What they do not share is a network.
    with suppress(OSError):
        identity += "-" + str(os.stat("/proc/self/ns/net").st_ino)
    return identity


def _address() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with suppress(OSError):
        if name:
            return address_of_interface(name)
        return socket.gethostbyname(socket.gethostname())
    return ""


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    with suppress(Exception):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return ""


def _device(local_rank: int) -> tuple[str, str, int, int, int]:
    """Name, identity, number of accelerators, used and all bytes of this rank's."""
    if not torch.cuda.is_available():
        return "", "", 0, 0, 0
    count = torch.cuda.device_count()
    if local_rank >= count:
        return "", "", count, 0, 0
    about = torch.cuda.get_device_properties(local_rank)
    free, total = torch.cuda.mem_get_info(local_rank)
    identity = str(getattr(about, "uuid", f"device {local_rank}"))
    return about.name, identity, count, total - free, total


def _free_bytes(path: str) -> int:
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return 0
