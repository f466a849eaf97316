"""Writing a part of a snapshot: what a rank writes of a checkpoint, in separate files."""

from __future__ import annotations

from ..checkpoint.format.manifest import Manifest, marker_name
from ..checkpoint.format.marker import dump
from ..checkpoint.format.ranges import Ranges
from ..checkpoint.format.small_state import digest_of_names
from ..checkpoint.saving.capture import Captured
from ..checkpoint.saving.job import describe_writer, plan_of, write_small_files
from ..checkpoint.saving.staging import Staged
from ..checkpoint.saving.writing import Progress, Writer
from .choice import PartName
from .folder import Folder


def write_part(folder: Folder, part: PartName, captured: Captured, staged: Staged) -> None:
    """Write a part into its place.

    Args:
        staged: as `Staging.fill` returned it for ``captured``.

    Raises:
        OSError: if there is no space; nothing is left behind.
    """
    disk, ranks = folder.disk, tuple(range(part.num_ranks))
    plan = plan_of(captured, part.rank, ranks, layout="per-rank")
    with folder.incoming(part) as path, disk.directory(path) as into:
        checksums = Writer(disk, plan, staged(), Progress(plan.nbytes)).write(into)
        small, values = write_small_files(disk, captured, part.rank, into)
        manifest = Manifest(
            nonce=part.generation.name,
            name=f"step-{part.generation.step:06d}",
            rank=part.rank,
            ranks=Ranges.of(ranks),
            sets=plan.recorded(checksums),
            aliases=captured.aliases,
            small_files=small,
            writer=describe_writer(),
            optimizer_names=digest_of_names(captured.values),
        )
        marker = marker_name(part.rank, part.num_ranks)
        disk.write_file(marker, dump(manifest, values), into, unique="marker")
