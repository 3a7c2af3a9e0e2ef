"""Counters and log lines that all indexes share."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.index.contract import VolumeEpoch
from kvstore.index.record import BatchEdit
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.observe.metrics import Event

limited = LimitedLog(logging.getLogger(__name__))

Count = Callable[[Event, int], None]

_CONFLICTS = "ignored keys that the index holds at another depth (volume_epoch=%d, keys=%d)"
_FOREIGN = "ignored keys that the index holds for another namespace: no lookup finds them (volume_epoch=%d, keys=%d)"
_UNNAMED = "ignored keys of new namespaces: the index holds as many namespaces as it may (volume_epoch=%d, keys=%d)"
_REPLACED = "replaced records of another depth: the published parents are in the index (volume_epoch=%d, keys=%d)"


def count_nothing(_event: Event, _amount: int) -> None:
    """Count nothing."""


def report_ignored(edit: BatchEdit, volume_epoch: VolumeEpoch, count: Count) -> None:
    """Count and log the blocks of a batch that were ignored, or that replaced others."""
    for keys, counter, line in (
        (edit.conflicts, metadata_metrics.INDEX_KEY_CONFLICTS, _CONFLICTS),
        (edit.foreign, metadata_metrics.INDEX_KEY_FOREIGN, _FOREIGN),
        (edit.unnamed, metadata_metrics.INDEX_KEY_UNNAMED, _UNNAMED),
        (edit.replaced, metadata_metrics.INDEX_KEY_REPLACED, _REPLACED),
    ):
        if keys:
            limited.warning(line, volume_epoch, keys)
            count(counter, keys)
