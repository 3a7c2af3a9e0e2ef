"""Options of the connector for engines that prefill or decode: those of the connector, and these."""

from __future__ import annotations

from dataclasses import dataclass

from kvclient import InvalidArgument
from kvclient.call.arguments import check_seconds
from kvclient.engines.vllm.options import ConnectorOptions


@dataclass(frozen=True, slots=True)
class PdOptions(ConnectorOptions):
    """What ``kv_connector_extra_config`` may hold.

    Attributes:
        prompt_deadline_s: how long a decode engine waits for a prompt. Then it loads what the store has, and computes the rest.
        handoff_deadline_s: bound of the handoff of one step of a prefill engine.
        max_prompts: prompts that a decode engine waits for at once; more wait for their turn.
    """

    prompt_deadline_s: float = 30.0
    handoff_deadline_s: float = 10.0
    max_prompts: int = 256

    def __post_init__(self) -> None:
        ConnectorOptions.__post_init__(self)  # slots make a new class, which `super` without arguments does not know
        if self.stored_dtype != "engine":  # the last page is handed over in part, and old numbers in it would share the scales
            raise InvalidArgument("handoffs require stored_dtype engine: use KVStoreConnector", stored_dtype=self.stored_dtype)
        for name in ("prompt_deadline_s", "handoff_deadline_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        if not isinstance(self.max_prompts, int) or isinstance(self.max_prompts, bool) or self.max_prompts < 1:
            raise InvalidArgument("the option must be an integer of at least 1", option="max_prompts", value=self.max_prompts)
