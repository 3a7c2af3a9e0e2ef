"""Which label namespaces of a model are published in one stream. Pure, apart from log lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvclient.events.labels import LabelNamespace
from kvstore.config.events import EventsConfig
from kvstore.core import limits
from kvstore.core.spec import CacheSpec
from kvstore.core.types import NamespaceId
from kvstore.observe.limited_log import LimitedLog

limited = LimitedLog(logging.getLogger(__name__))

MOST_NAMESPACES: Final = limits.MAX_NAMESPACES_OF_TENANT


class NamespaceChoice:
    """Chooses label namespaces of one model, of engines that hash alike. A chosen namespace stays chosen.

    A router would see a block twice, under two hashes, if engines with different algorithms or seeds were published together.

    Args:
        config: model, namespaces, and algorithm.
    """

    def __init__(self, config: EventsConfig) -> None:
        self._model = config.model
        self._only = frozenset(config.namespace_ids)
        self._engine_hash = config.engine_hash
        self._chosen: dict[NamespaceId, LabelNamespace] = {}
        self.ignored = 0
        """Label namespaces of the model that are not published: engines that hash differently, or too many namespaces."""

    def choose(self, specs: Sequence[CacheSpec]) -> list[LabelNamespace]:
        """Return the namespaces to publish.

        Args:
            specs: all namespaces of the store.
        """
        read = [LabelNamespace.read(spec, specs) for spec in specs if spec.model == self._model]
        found = [one for one in read if one is not None and (not self._only or self._only.issuperset(one.labelled))]
        if not found:
            known = sorted({spec.model for spec in specs if LabelNamespace.read(spec, specs) is not None})
            limited.warning("no labelled blocks of model %s (models with labels: %s)", self._model, ", ".join(known) or "none")
        self._engine_hash = self._engine_hash or min((one.engine_hash for one in found), default="")
        others = {one.engine_hash for one in found if one.engine_hash != self._engine_hash}
        if others:
            limited.warning(
                "labels ignored: engines hash differently (published=%s, ignored=%s); see events.engine_hash",
                self._engine_hash,
                ", ".join(sorted(others)),
            )
        alike = [one for one in found if one.engine_hash == self._engine_hash]
        new = [one for one in alike if one.spec.namespace not in self._chosen]
        space = MOST_NAMESPACES - len(self._chosen)
        if len(new) > space:
            limited.warning("labels ignored: too many namespaces; select some with --namespace (limit=%d)", MOST_NAMESPACES)
        self._chosen |= {one.spec.namespace: one for one in new[:space]}
        if len({(one.spec.tenant, one.spec.salt, one.spec.weights_epoch) for one in self._chosen.values()}) > 1:
            limited.warning("several tenants or weights epochs are published in one stream: select some with --namespace")
        self.ignored = sum(one.spec.namespace not in self._chosen for one in found)
        return list(self._chosen.values())
