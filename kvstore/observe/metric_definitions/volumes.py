"""Metrics of volumes: arena, NVMe slabs, mounted volumes."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Volumes")
ARENA_CLOSED_WITH_VIEWS: Final = group.counter(
    "arena_closed_with_views_total", "arenas closed while memory of them was still in use"
)
ARENA_CORRUPT_BLOCKS: Final = group.counter("arena_corrupt_blocks_total", "blocks in DRAM with a wrong checksum")
ARENA_HUGE_PAGES_REFUSED: Final = group.counter(
    "arena_huge_pages_refused_total", "refusals of the reserved huge pages that an arena asked for, or of transparent ones"
)
ARENA_PREFAULT_STOPPED: Final = group.counter(
    "arena_prefault_stopped_total", "arenas whose memory could not be allocated in advance"
)
ARENA_ACCEPT_ERRORS: Final = group.counter(
    "arena_accept_errors_total", "failed attempts to accept a connection to the arena server"
)
ARENA_CONNECTIONS_REFUSED: Final = group.counter("arena_connections_refused_total", "connections refused by the arena server")
ARENA_INTERNAL_ERRORS: Final = group.counter("arena_internal_errors_total", "internal errors of the arena server")
NVME_CORRUPT_BLOCKS: Final = group.counter("nvme_corrupt_blocks_total", "blocks on volumes with a wrong header or checksum")
NVME_DIRECT_IO_REFUSED: Final = group.counter(
    "nvme_direct_io_refused_total", "volumes whose file system does not support direct I/O"
)
NVME_FILES_GONE: Final = group.counter(
    "nvme_files_gone_total", "volumes whose files were removed, moved or mounted over while in use"
)
NVME_IO_STALLED: Final = group.counter("nvme_io_stalled_total", "stalled I/O requests; their memory is reserved until they end")
NVME_OPENED_READ_ONLY: Final = group.counter("nvme_opened_read_only_total", "volumes that were opened read-only at start")
NVME_READ_ERRORS: Final = group.counter("nvme_read_errors_total", "reads that failed with an I/O error")
NVME_RECOVERY_DROPPED: Final = group.counter("nvme_recovery_dropped_total", "invalid catalog entries dropped at start")
NVME_RESUMED: Final = group.counter("nvme_resumed_total", "read-only volumes that accept blocks again")
NVME_THREADS_REFUSED: Final = group.counter(
    "nvme_threads_refused_total", "batches of I/O with fewer threads because one could not be started"
)
NVME_SYNC_ERRORS: Final = group.counter("nvme_sync_errors_total", "syncs that failed with an I/O error")
NVME_WRITE_ERRORS: Final = group.counter("nvme_write_errors_total", "writes that failed with an I/O error")
FENCED_WRITES_REFUSED: Final = group.counter(
    "fenced_writes_refused_total", "writes and commits refused because another node has adopted the volume"
)
ADOPTED_VOLUMES: Final = group.counter("adopted_volumes_total", "volumes that this node has adopted from another node")
ADOPTIONS_FAILED: Final = group.counter("adoptions_failed_total", "failed attempts to adopt a volume")
ADOPTED_CATALOGS_REBUILT: Final = group.counter(
    "adopted_catalogs_rebuilt_total", "catalogs rebuilt from slot headers while a volume was adopted"
)
FENCED_VOLUMES: Final = group.counter("fenced_volumes_total", "volumes of this node that another node has adopted")
FENCING_CHECKS_FAILED: Final = group.counter(
    "fencing_checks_failed_total", "checks of a volume's owner that failed, so that nothing was written"
)
FENCING_TOKENS_RESTORED: Final = group.counter(
    "fencing_tokens_restored_total", "superblocks written again after a late write of an earlier owner"
)
ADOPTED_BLOCKS_UNUSED: Final = group.counter(
    "adopted_blocks_unused_total",
    "blocks of adopted volumes left out until the next opening, because this node's block with the same key conflicts or was"
    " busy",
)
VOLUME_STALLS: Final = group.counter("volume_stalls_total", "stalls of a volume, own or mounted")
VOLUME_STALL_REFUSED_BLOCKS: Final = group.counter(
    "volume_stall_refused_blocks_total", "blocks not read because their volume was stalled"
)
DEVICE_READS_BOUNCED: Final = group.counter(
    "device_reads_bounced_total", "reads into device memory that were copied through host memory"
)
GDS_DEVICE_READS: Final = group.counter("gds_device_reads_total", "reads directly into device memory")
GDS_GIVEN_UP: Final = group.counter("gds_given_up_total", "volumes on which GPUDirect Storage was switched off after failures")
GDS_NOT_USABLE: Final = group.counter("gds_not_usable_total", "volumes on which GPUDirect Storage is not usable")
GDS_PRETENDED: Final = group.counter(
    "gds_pretended_total", "volumes on which GPUDirect Storage copies through host memory, which is slower"
)
GDS_READ_FAILURES: Final = group.counter(
    "gds_read_failures_total", "failed reads by GPUDirect Storage, repeated through host memory"
)
GDS_REFUSED: Final = group.counter("gds_refused_total", "volumes that could not be opened for GPUDirect Storage")
GDS_STALLED: Final = group.counter("gds_stalled_total", "stalled reads by GPUDirect Storage")
MOUNT_ERRORS: Final = group.counter("mount_errors_total", "failures of mounted volumes")
MOUNT_MISSED_BLOCKS: Final = group.counter("mount_missed_blocks_total", "blocks not found on mounted volumes")
MOUNT_READ_BLOCKS: Final = group.counter("mount_read_blocks_total", "blocks read from mounted volumes")
MOUNT_STALE_BLOCKS: Final = group.counter(
    "mount_stale_blocks_total", "blocks of mounted volumes that were overwritten before they were read"
)
MOUNT_STALLED: Final = group.counter("mount_stalled_total", "mounted volumes no longer used because their I/O stalls")
SLOT_MANIFEST_ERRORS: Final = group.counter("slot_manifest_errors_total", "slot manifests that could not be written or read")
