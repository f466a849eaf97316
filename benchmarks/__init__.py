"""Benchmarks of `fsdp2` against plain training, DDP, FSDP1 and torch's FSDP2.

Run with `python -m benchmarks`; what is measured and how to read it is in benchmarks/README.md.
Files, in the order of a run: `__main__` (command line), `ranks` (processes), `models` and
`variants` (what is compared), `steps` (timed steps and their check), `lm`, `hooks`, `memory`,
`copies` (one measure each), `report` (JSON and table).
"""
