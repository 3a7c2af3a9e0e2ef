"""Metrics of device memory: the engine's pool, and copies between the arena and a device."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import MetricGroup

group = MetricGroup("The engine's pool of device memory")
HBM_ASKED_BLOCKS: Final = group.counter("hbm_asked_blocks_total", "blocks looked up in the engine's pool")
HBM_HIT_BLOCKS: Final = group.counter("hbm_hit_blocks_total", "blocks found in the engine's pool")
HBM_CORRUPT_BLOCKS: Final = group.counter("hbm_corrupt_blocks_total", "blocks of the pool with a wrong checksum")
HBM_DEMOTED_BLOCKS: Final = group.counter("hbm_demoted_blocks_total", "blocks moved from the pool to the node")
HBM_NOT_DEMOTED_BLOCKS: Final = group.counter(
    "hbm_not_demoted_blocks_total", "blocks evicted from the pool that no node accepted"
)
HBM_DEMOTION_BUGS: Final = group.counter("hbm_demotion_bugs_total", "demotions that failed with an unexpected exception: a bug")
HBM_DEMOTION_WITHOUT_CLIENT_BLOCKS: Final = group.counter(
    "hbm_demotion_without_client_blocks_total", "blocks evicted from the pool while no client was there to demote them"
)
HBM_DEVICE_ERRORS: Final = group.counter("hbm_device_errors_total", "device failures after which the pool is no longer used")
HBM_INSERTED_BLOCKS: Final = group.counter("hbm_inserted_blocks_total", "blocks inserted into the pool")
HBM_BY_HOST_BLOCKS: Final = group.counter(
    "hbm_by_host_blocks_total", "blocks copied between the pool and the engine's pages through host memory"
)
HBM_NO_SPACE_BLOCKS: Final = group.counter("hbm_no_space_blocks_total", "blocks not inserted because the pool was full")
HBM_NOT_REGISTERED_AT_START: Final = group.counter(
    "hbm_not_registered_at_start_total", "pools that could not register with the metadata server when they started"
)
HBM_RESIZE_REFUSED: Final = group.counter(
    "hbm_resize_refused_total", "rejected changes of the pool's size because blocks were in use"
)
HBM_CLOSED_IN_USE: Final = group.counter(
    "hbm_closed_in_use_total", "pools closed during reads; their memory was freed after the last read"
)
HBM_CONTROL_SERVER_FAILED: Final = group.counter(
    "hbm_control_server_failed_total", "control servers of pools that ended unexpectedly: a bug"
)
HBM_FAILED_OPERATIONS: Final = group.counter(
    "hbm_failed_operations_total", "failed copies to or from the pool on a working device"
)
HBM_OUT_OF_MEMORY: Final = group.counter(
    "hbm_out_of_memory_total", "copies to or from the pool that failed to allocate working memory"
)
HBM_TOO_SMALL: Final = group.counter(
    "hbm_too_small_total", "times that the pool was too small for one block after a change of its size"
)
HBM_LOCATED_BLOCKS: Final = group.counter(
    "hbm_located_blocks_total", "blocks to be read from the node's volumes directly into the pool"
)
HBM_DISK_BLOCKS: Final = group.counter("hbm_disk_blocks_total", "blocks read from the node's volumes directly into the pool")
HBM_DISK_FAILED_BLOCKS: Final = group.counter(
    "hbm_disk_failed_blocks_total", "failed direct reads from the node's volumes; the node is asked for these blocks"
)
HBM_DISK_LATE_BLOCKS: Final = group.counter(
    "hbm_disk_late_blocks_total", "direct reads still running at the deadline; their device memory is reserved until they end"
)
HBM_NOT_REGISTERED_WITH_GDS: Final = group.counter(
    "hbm_not_registered_with_gds_total", "failed registrations of device memory with GPUDirect Storage"
)
HBM_DISK_BUGS: Final = group.counter(
    "hbm_disk_bugs_total", "direct reads of a volume that failed with an unexpected exception: a bug"
)
HBM_UNPINNED_STAGING: Final = group.counter(
    "hbm_unpinned_staging_total", "failed allocations of pinned memory for copies, which are slower without it"
)

group = MetricGroup("Copies between the arena and a device")
DEVICE_BATCH_REFUSED: Final = group.counter(
    "device_batch_refused_total", "devices without batched copies; their copies go through a staging buffer"
)
DEVICE_CHECKSUMS_BY_HOST: Final = group.counter(
    "device_checksums_by_host_total",
    "failures to compute checksums on the device; they were computed on the host, or the node read the blocks",
)
DEVICE_ERRORS: Final = group.counter("device_errors_total", "copies that the device rejected")
DEVICE_GDS_BLOCKS: Final = group.counter(
    "device_gds_blocks_total", "blocks read from the node's volumes directly into device memory, and copied into pages"
)
DEVICE_GDS_BUSY: Final = group.counter(
    "device_gds_busy_total", "reads of volumes left to the node because the landing ring had no free slot or memory in time"
)
DEVICE_GDS_CORRUPT_BLOCKS: Final = group.counter(
    "device_gds_corrupt_blocks_total", "blocks in the landing ring with wrong checksums; the node is asked for them"
)
DEVICE_GDS_FAILED_BLOCKS: Final = group.counter(
    "device_gds_failed_blocks_total", "blocks not loaded through the landing ring; the node is asked for them"
)
DEVICE_GDS_REFUSED: Final = group.counter(
    "device_gds_refused_total", "KV caches without a landing ring, because their device has no checksums, memory or copies"
)
DEVICE_LOADED_BYTES: Final = group.counter("device_loaded_bytes_total", "bytes of started copies into a device's pages")
DEVICE_LOST: Final = group.counter("device_lost_total", "KV caches no longer used because copies on their device failed or hung")
DEVICE_PIN_REFUSED: Final = group.counter("device_pin_refused_total", "arenas that the driver could not pin completely")
DEVICE_PIN_RETRIES: Final = group.counter(
    "device_pin_retries_total", "retries of pinning, which the driver rejects during graph capture"
)
DEVICE_PIN_TURNS_MISSED: Final = group.counter(
    "device_pin_turns_missed_total", "chunks of an arena pinned or unpinned without a turn among the processes of the host"
)
DEVICE_POOL_LOADED_BYTES: Final = group.counter(
    "device_pool_loaded_bytes_total", "bytes of started copies from the engine's pool into pages"
)
DEVICE_POOL_STORED_BYTES: Final = group.counter(
    "device_pool_stored_bytes_total", "bytes of started copies from pages into the engine's pool"
)
DEVICE_POPULATE_REFUSED: Final = group.counter(
    "device_populate_refused_total", "arenas that the kernel did not populate; the driver finds their pages while it pins them"
)
DEVICE_STORED_BYTES: Final = group.counter("device_stored_bytes_total", "bytes of started copies from a device's pages")
DEVICE_TRIALS_FAILED: Final = group.counter(
    "device_trials_failed_total", "copy strategies that failed in the trial copies at start, per direction"
)
DEVICE_TRIALS_LATE: Final = group.counter(
    "device_trials_late_total", "calibrations whose trial copies did not end; their memory stays reserved"
)
DEVICE_UNCALIBRATED: Final = group.counter(
    "device_uncalibrated_total", "directions whose copy strategy was chosen by a rule, because it could not be measured"
)
DEVICE_UNPIN_FAILED: Final = group.counter(
    "device_unpin_failed_total", "arenas that stay mapped because they could not be unpinned"
)
DEVICE_UNPINNED_BYTES: Final = group.counter(
    "device_unpinned_bytes_total", "bytes copied to or from unpinned memory, which is slower"
)
DEVICE_WITHOUT_TRITON: Final = group.counter(
    "device_without_triton_total", "copiers that use torch indexing because Triton does not work"
)
