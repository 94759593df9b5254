"""The run's copy at the URL ``checkpoint.storage``: checked and brought up to date before training."""

from __future__ import annotations

from collections.abc import Callable

from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.checkpoint.mirror import Mirror, StoredVersion
from dglkge.config import Config
from dglkge.distributed.lease import Lease
from dglkge.distributed.runtime import Cluster
from dglkge.training.resume import check_settings


def open_mirror(config: Config, cluster: Cluster, lease: Lease, meta: CheckpointMeta) -> Mirror | None:
    """Open the run's copy and bring every disk of the job to the newer version; a collective.

    Returns
    -------
    Mirror or None
        On rank 0, if a URL is configured.

    Raises
    ------
    InputError
        On all trainers: for a URL that cannot be opened, or a copy of another run.
    StorageError
        On all trainers, if the store cannot be reached.
    """
    url, world = config.checkpoint.storage, cluster.world
    if not url:
        return None
    is_owner = world.rank == 0 or (world.has_own_disk and world.is_machine_leader)
    mirror = Mirror(url, config.output, lease) if is_owner else None
    # Rank 0 first: it may have a version that was not uploaded when its job was killed.
    _agree(cluster, mirror if world.rank == 0 else None, lambda saved: _check(config, saved, meta))
    _agree(cluster, mirror if world.rank != 0 else None, None)
    return mirror if world.rank == 0 else None


def _check(config: Config, saved: CheckpointMeta, meta: CheckpointMeta) -> None:
    """Refuse to take a URL with another run, or one with other settings."""
    check_same_run(saved, meta)
    training = dict(meta.config["training"])
    if training["matmul_dtype"] == "auto":
        del training["matmul_dtype"]  # chosen later, as the run has recorded it
    check_settings(config, saved, {**meta.config, "training": training}, config.checkpoint.storage)


def _agree(
    cluster: Cluster, mirror: Mirror | None, check: Callable[[CheckpointMeta], object] | None
) -> None:
    """Bring a disk and the URL to the newer version, on the trainers with a mirror; a collective.

    With a check of the run there the job takes the URL.
    """
    found: list[StoredVersion | None] = []

    def find() -> None:
        """Read the pointer and the manifest."""
        if mirror is not None:
            found.append(mirror.newest() if check is None else mirror.take(check))

    cluster.agree(find)
    sizes = [one.manifest.num_bytes for one in found if one is not None]
    most = max(map(int, cluster.gather_texts(str(max(sizes, default=0)))))
    cluster.agree(lambda: mirror.agree(found[0], check is not None) if mirror is not None else None, most)
