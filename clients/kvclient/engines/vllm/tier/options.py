"""Options of the tier: ``kv_connector_extra_config["kvstore"]``. The other keys there are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

OPTIONS_KEY = "kvstore"
_OWN = ("weights_epoch_file", "workers", "idle_wait_ms", "block_labels", "events_blocks", "allow_untested_vllm")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of the tier.

    Attributes:
        hook: options common to all hooks.
        weights_epoch_file: a file that names the weights epoch, instead of ``weights_epoch``: read at start, and after a reset of
            the connector's cache in the first step that computes.
        workers: threads for loads, and as many for stores.
        idle_wait_ms: how long a step without tokens waits for a load, store or lookup to end, so that an idle engine does not
            spin.
        block_labels: whether tokens and hashes of stored chunks are stored beside them, so that ``kvstore events --model`` can
            publish these chunks to routers.
        events_blocks: stored chunks per KV cache group that this engine announces as KV events, if vLLM publishes them; older
            ones are retracted.
        allow_untested_vllm: whether versions of vLLM with which the tier is not tested are accepted.
    """

    hook: HookOptions = field(default_factory=HookOptions)
    weights_epoch_file: str = ""
    workers: int = 4
    idle_wait_ms: float = 5.0
    block_labels: bool = False
    events_blocks: int = 262_144
    allow_untested_vllm: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.workers, int) or isinstance(self.workers, bool) or not 1 <= self.workers <= 64:
            raise InvalidArgument("the option must be an integer from 1 to 64", option="workers", value=self.workers)
        wait_ms = self.idle_wait_ms
        if isinstance(wait_ms, bool) or not isinstance(wait_ms, int | float) or not 0 <= wait_ms <= 100:
            raise InvalidArgument("the option is out of its range", option="idle_wait_ms", value=wait_ms, least=0, most=100)
        for name in ("block_labels", "allow_untested_vllm"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument("the option must be true or false", option=name, value=getattr(self, name))
        if not isinstance(self.events_blocks, int) or isinstance(self.events_blocks, bool) or self.events_blocks < 1:
            raise InvalidArgument("the option must be an integer of at least 1", option="events_blocks", value=self.events_blocks)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Read the options.

        Raises:
            InvalidArgument: an unknown key, or a value of the wrong type or range.
        """
        given = extra_config.get(OPTIONS_KEY, {})
        if not isinstance(given, Mapping):
            raise InvalidArgument(f'kv_connector_extra_config["{OPTIONS_KEY}"] must be a mapping of options')
        hook = HookOptions.from_mapping(given, known_elsewhere=_OWN)
        if given.get("weights_epoch_file") and hook.weights_epoch:
            raise InvalidArgument("weights_epoch_file must be a path, without weights_epoch beside it")
        if not hook.metadata:
            raise InvalidArgument("lookups require a metadata server", option="metadata")
        return cls(hook=hook, **{name: given[name] for name in _OWN if name in given})
