"""vLLM's own offloading with its ``fs`` tier on a CPU, with the same copies and pauses as the store's tier.

vLLM's worker for host memory needs a device, so pages are copied by the worker of ``kvclient.engines.vllm.tier``, which keeps
the interpreter free. A step without tokens pauses, as with the store's tier: otherwise vLLM would spin through thousands of
empty steps in the process in which the fs tier's threads work.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

PAUSE_S = 0.001


class PausingOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's connector; its empty steps pause."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401  # vLLM's types
        """Return the plan of a step."""
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(PAUSE_S)
        return super().build_connector_meta(scheduler_output)
