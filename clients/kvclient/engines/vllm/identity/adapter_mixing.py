"""Whether vLLM may have computed requests without an adapter with the weights of one.

vLLM 0.32 does so on CPUs, in each step that computes requests of both kinds: it takes the last adapter that it holds for tokens
without one (``lora_indices`` -1 in ``vllm/lora/ops/torch_ops``). This KV stays in vLLM's own prefix cache, from which later
requests continue. So after the first such step, nothing of requests without an adapter can be shared until the engine restarts.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


class AdapterMixing:
    """Watches the steps of one engine. For the thread of the scheduler.

    Args:
        vllm_config: vLLM's configuration; None: there is no such engine.

    Attributes:
        happened: whether requests with and without an adapter were computed in one step, in an engine that mixes them up.
    """

    def __init__(self, vllm_config: Any = None) -> None:  # noqa: ANN401
        self.happened = False
        self._possible = vllm_config is not None and getattr(vllm_config, "lora_config", None) is not None and _is_cpu()
        self._adapted: set[str] = set()
        """Ids of unfinished requests with an adapter."""

    def step_planned(self, scheduler_output: Any) -> None:  # noqa: ANN401
        """Look at the requests of a step, before stores of the step are planned."""
        if not self._possible or self.happened:
            return
        self._adapted -= scheduler_output.finished_req_ids
        self._adapted |= {new.req_id for new in scheduler_output.scheduled_new_reqs if new.lora_request is not None}
        scheduled = scheduler_output.num_scheduled_tokens.keys()
        if 0 < len(scheduled & self._adapted) < len(scheduled):
            self.happened = True
            self._adapted.clear()
            _log.warning(
                "requests without an adapter are no longer stored: on a CPU, vLLM computes them with another request's adapter "
                "if one step has both; serve them by an engine without --enable-lora"
            )


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
