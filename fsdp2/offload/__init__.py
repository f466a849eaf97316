"""Activations in host memory instead of on the device: see `fsdp2.offload_activations`."""

from __future__ import annotations
