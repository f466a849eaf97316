"""Snapshots in host memory: what lies where, and how it gets there and back."""
