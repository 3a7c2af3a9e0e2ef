"""The connector's counters, declared once for vLLM's log line and for its Prometheus endpoint."""

from __future__ import annotations

import threading

COUNTERS = {
    "lookups": "Requests that were looked up in the store.",
    "lookup_failures": "Lookups that the store did not answer in time: misses.",
    "lookups_late": "Lookups that waited for a thread past their deadline: misses.",
    "lookups_asked_again": "Scheduling steps in which a request waited for its lookup.",
    "waits_for_shared_loads": "Scheduling steps in which a request waited for a layer-wise load of another one.",
    "lookup_blocks": "Blocks that were looked up.",
    "hit_blocks": "Blocks among them that the store had, in all groups and shards.",
    "reads_ahead": "Prefixes read ahead while requests waited in the queue, per worker. Longer waits count again each minute.",
    "verdicts_load": "Requests whose found blocks were all to be loaded, since that was predicted to be fastest.",
    "verdicts_cut": "Requests of which only the first found blocks were to be loaded, since computing the rest should be faster.",
    "verdicts_compute": "Requests whose found blocks were to be computed, since that was predicted to be faster.",
    "verdicts_probe": "Requests of which a few blocks were to be loaded, within a short time, to measure a slow source again.",
    "verdicts_unmeasured": "Requests whose found blocks were to be loaded, since too little was measured for a prediction.",
    "verdicts_priced": "Verdicts for which the planner said how busy the storage links are.",
    "prices_missed": "Prices that the planner did not give in time: durations of earlier loads were used.",
    "verdict_saved_seconds": "Predicted seconds saved by not loading all found blocks, in total.",
    "load_predictions": "Loads whose duration was predicted, and that came out of the predicted tiers.",
    "load_predicted_seconds": "Predicted seconds of these loads, added up.",
    "load_prediction_error_seconds": "Differences between predicted and measured seconds of these loads, added up.",
    "step_predictions": "Steps with prompts whose duration was predicted.",
    "step_predicted_seconds": "Predicted seconds of these steps, added up.",
    "step_prediction_error_seconds": "Differences between predicted and measured seconds of these steps, added up.",
    "loads": "Requests whose prefix was loaded from the store, or was to be.",
    "load_tokens": "Tokens that were to be loaded.",
    "loads_failed": "Loads that returned fewer blocks than were found; the rest was computed.",
    "pages_uncached": "Pages taken out of the engine's prefix cache because a layer-wise load did not fill them.",
    "loads_aborted": "Loads that were given up because their request ended.",
    "load_blocks": "Blocks loaded, per group and worker.",
    "load_missing_blocks": "Blocks found but not loaded, per group and worker; without those of probes.",
    "probe_missing_blocks": "Blocks that probes of slow sources did not load in their short time, per worker.",
    "load_bytes": "Bytes loaded.",
    "load_dram_bytes": "Bytes loaded from DRAM.",
    "load_nvme_bytes": "Bytes loaded from NVMe.",
    "load_local_path_bytes": "Bytes loaded from the DRAM of this host's node.",
    "load_prefill_path_bytes": "Bytes sent by other nodes, or read over this host's storage link by a load plan.",
    "load_decode_path_bytes": "Bytes read over the storage link of the decode host by a load plan.",
    "load_relay_path_bytes": "Bytes read over the storage links of other hosts by a load plan.",
    "load_seconds": "Seconds that loads took, added up.",
    "store_blocks": "Blocks offered to the store, per request.",
    "stores": "Calls that stored blocks, per group and worker.",
    "store_bytes": "Bytes that were stored: not those that the store held already.",
    "store_seconds": "Seconds that stores took, added up.",
    "adapters_unknown": "Requests neither loaded nor stored, since their adapter's weights are not known for certain.",
    "media_unnamed": "Requests neither loaded nor stored, since vLLM does not name their media by content.",
    "stores_unsure": "Stores and handoffs cancelled: the adapter or its files changed (per worker), or a CPU mixed adapters up.",
    "stores_failed": "Stores after which the store lacks some of the blocks.",
    "stores_not_begun": "Stores of steps whose end vLLM did not report, per worker.",
    "stores_late": "Stores that waited past their deadline, per group and worker.",
    "stores_dropped": "Stores cancelled by a reset of the cache, per group and worker.",
    "stores_skipped": "Requests of which nothing more is stored: too many blocks wait already.",
    "stores_broken": "Requests of which nothing more is stored: a sliding window has passed blocks that the store lacks.",
    "stores_given_up": "Requests of which nothing more is stored: it failed too often.",
    "handoff_blocks": "Blocks of prompts to hand over to decode engines, per request.",
    "handoff_bytes": "Bytes that were handed over: not those that the decode host had already.",
    "handoff_seconds": "Seconds that handoffs took, added up.",
    "handoffs_failed": "Handoffs after which the decode host lacks some of the blocks.",
    "handoffs_retried": "Retries of failed handoffs, per worker.",
    "handoffs_skipped": "Requests whose prompt is not handed over: too many pages wait already.",
    "prompts": "Prompts received whole, per worker.",
    "prompts_incomplete": "Prompts that did not arrive whole in time, per worker: the rest was loaded or computed.",
    "prompts_of_other_namespaces": "Prompts not awaited: the prefill engine's pages are of another namespace.",
    "prompts_failed": "Prompts received but not copied: loaded or computed instead.",
    "prompt_bytes": "Bytes of prompts that were copied into the engine.",
    "transfers_abandoned": "Prompts that are not handed over whole; their decode hosts are notified.",
    "transfers_refused": "Requests with invalid kv_transfer_params: served as if they had none.",
    "whole_prompts_only": "Starts with a model or backend that cannot continue after a prefix: nothing is loaded or stored.",
    "device_loaded_bytes": "Bytes of started copies into the KV cache on a device.",
    "device_stored_bytes": "Bytes of started copies out of the KV cache on a device.",
    "device_unpinned_bytes": "Bytes among these from or to memory that is not pinned, which is slower.",
    "device_errors": "Copies that the device refused: nothing was loaded or stored.",
    "device_lost": "Devices that failed or did not finish copies, and are no longer used, per group.",
    "device_pin_refused": "Arenas that the driver did not pin whole.",
    "device_pin_retries": "Pins retried, since the driver refuses them while graphs are captured.",
    "device_pin_turns_missed": "Parts of an arena pinned without a turn among the processes of the host.",
    "device_pinned_late": "Starts that did not wait until the whole arena was pinned, per group.",
    "device_batch_refused": "Devices that refused batched copies and use staged ones, per group.",
    "device_checksums_by_host": "Failures to compute checksums on the device: the host computed them.",
    "device_gds_blocks": "Blocks read from the node's volumes directly into device memory, and copied into pages.",
    "device_gds_busy": "Direct reads left to the node, since the landing ring had no free slot or memory in time.",
    "device_gds_corrupt_blocks": "Blocks in the landing ring with wrong checksums: the node read them.",
    "device_gds_failed_blocks": "Blocks whose direct read failed: the node read them.",
    "device_gds_refused": "Groups without direct reads, since their device has no checksums, memory or copies.",
    "device_trials_failed": "Copy strategies that failed in the trial copies at start, per group and direction.",
    "device_trials_late": "Groups whose trial copies at start did not end: their memory stays reserved.",
    "device_uncalibrated": "Groups and directions whose copy strategy a rule chose, since it could not be measured.",
    "device_sleeps": "Times that the engine slept: its loads and stores were cancelled first.",
    "device_without_triton": "Groups whose pages are moved by torch's indexing, since Triton is missing or fails.",
    "hbm_disk_bugs": "Direct reads of a volume that failed with an unexpected exception: a bug.",
    "hbm_disk_late_blocks": "Blocks whose direct read was late: their slots are reserved until it ends.",
    "hbm_not_registered_with_gds": "Failed registrations of a landing ring with GPUDirect Storage.",
    "labels_stored": "Labels of blocks that were stored, or stored again.",
    "labels_failed": "Labels of blocks that were not stored: routers that follow the store do not see these blocks.",
    "labels_dropped": "Runs of blocks without labels, since too many waited for them.",
    "events_retracted": "Announced blocks that were retracted although they are stored, since too many were announced.",
    "events_unconfirmed": "Announced blocks that were retracted, since no event of the store confirmed them within 10 s.",
    "events_refused": "Subscriptions to the store's events that it refused: no blocks are announced.",
    "cache_published_blocks": "Blocks of the engine's own prefix cache that were handed to publication.",
    "cache_removed_blocks": "Blocks that were unpublished, since the engine's own prefix cache evicted them, or to make room.",
    "cache_ignored_blocks": "Blocks of the engine's own prefix cache that were left out or unpublished, since too many were.",
    "cache_publication_denied": "Times that the token began to be refused for publishing the engine's own prefix cache.",
    "cache_publication_failures": "Interruptions and refusals of publishing the engine's own prefix cache; it tries again.",
    "cache_inventories": "Times that too many changes of the engine's own prefix cache waited: all blocks are published again.",
    "cache_not_published": "Starts with a model or setting whose own prefix cache cannot be published.",
    "hints": "Hints about sessions, of requests that ended.",
    "hints_refused": "Hints that were ignored: invalid, too many in one step, of changed weights, or without stored blocks.",
    "resets": "Resets of the cache that demand that KV of earlier weights is not found.",
    "weights_epochs": "Weights epochs that began after the start, since the weights or their name changed.",
    "weights_checks_late": "Checks of the weights that not all workers answered in time.",
    "epochs_closed": "Failed resets, and epochs that could not begin: nothing is loaded or stored until a reset succeeds.",
    "bugs": "Failures that should be impossible; each is logged.",
}


class ConnectorCounters:
    """Counts since the last ``take``, and totals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, more: float = 1) -> None:
        """Add to a count. ``name`` must be in ``COUNTERS``."""
        assert name in COUNTERS, name
        with self._lock:
            self._new[name] = self._new.get(name, 0) + more

    def take(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with self._lock:
            taken, self._new = self._new, {}
            for name, value in taken.items():
                self._totals[name] = self._totals.get(name, 0) + value
            return taken

    def totals(self) -> dict[str, float]:
        """Return the counts since the start."""
        with self._lock:
            return {name: self._totals.get(name, 0) + self._new.get(name, 0) for name in {*self._totals, *self._new}}
