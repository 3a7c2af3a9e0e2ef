"""Metrics of engine hooks."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Engine hooks")
HOOK_BYPASSED: Final = group.counter("hook_bypassed_total", "prompts that the hook did not process")
HOOK_LOADED_TOKENS: Final = group.counter("hook_loaded_tokens_total", "tokens loaded by the transformers hook")
HOOK_LOOKUPS_LATE: Final = group.counter(
    "hook_lookups_late_total", "rows of batches that the hook did not look up before its deadline"
)
HOOK_PREFIX_UNUSED: Final = group.counter("hook_prefix_unused_total", "loaded prefixes that the model did not use")
HOOK_PROMPT_TOKENS: Final = group.counter("hook_prompt_tokens_total", "tokens of the prompts that the hook processed")
HOOK_PROMPTS: Final = group.counter("hook_prompts_total", "prompts that the hook processed")
HOOK_STORE_FAILED: Final = group.counter("hook_store_failed_total", "failed stores of the hook")
HOOK_STORE_REFUSED: Final = group.counter("hook_store_refused_total", "stores of the hook rejected because too many were queued")
HOOK_STORE_SKIPPED_BLOCKS: Final = group.counter("hook_store_skipped_blocks_total", "blocks that the hook could not store")
HOOK_STORE_STOPPED: Final = group.counter("hook_store_stopped_total", "sequences that the hook stopped storing")
HOOK_STORED_BLOCKS: Final = group.counter("hook_stored_blocks_total", "blocks stored by the hook")
HOOK_STORES_LATE: Final = group.counter("hook_stores_late_total", "waits of the hook for its stores that ended at their deadline")
SGLANG_CALLS: Final = group.counter_family(
    "sglang_calls_total", "calls of SGLang's storage backend", {"call": ("get", "set")}, "sglang_{call}_calls_total"
)
SGLANG_PAGES: Final = group.counter_family(
    "sglang_pages_total", "pages of these calls", {"call": ("get", "set")}, "sglang_{call}_pages_total"
)
SGLANG_GOOD_PAGES: Final = group.counter_family(
    "sglang_good_pages_total", "pages that these calls transferred", {"call": ("get", "set")}, "sglang_{call}_good_pages_total"
)
SGLANG_FAILED: Final = group.counter_family(
    "sglang_failed_total",
    "calls that failed in the store",
    {"call": ("get", "set", "exists", "clear", "flush", "close")},
    "sglang_{call}_failed_total",
)
SGLANG_BROKE: Final = group.counter_family(
    "sglang_broke_total",
    "calls that failed with an unexpected exception: a bug",
    {"call": ("get", "set", "exists", "clear", "flush", "close")},
    "sglang_{call}_broke_total",
)
SGLANG_COPIED_POOLS: Final = group.counter(
    "sglang_copied_pools_total", "SGLang pools whose pages are copied because they cannot be accessed in place"
)
SGLANG_PREFIXES_AS_REPORTED: Final = group.counter(
    "sglang_prefixes_as_reported_total", "backends that use the prefixes as SGLang reports them"
)
SGLANG_WEIGHTS_UNKNOWN: Final = group.counter(
    "sglang_weights_unknown_total", "pools without a name for the weights, from SGLang or from the configuration"
)
SGLANG_WEIGHT_UPDATES_UNSEEN: Final = group.counter(
    "sglang_weight_updates_unseen_total", "backends that SGLang does not tell when weights of its engine change"
)
SGLANG_SET_WITHOUT_PREFIX_PAGES: Final = group.counter(
    "sglang_set_without_prefix_pages_total", "pages not stored because their prefix is unknown"
)
