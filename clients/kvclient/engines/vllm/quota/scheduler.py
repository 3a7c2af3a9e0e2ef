"""vLLM schedulers that keep the attention time of a step within a quota (section 6.4 of the DualPath paper).

Choose one with ``--scheduler-cls``. Settings in ``--additional-config``: ``kvstore_attention_quota_ms`` (0: no quota), and
``kvstore_attention_pair_ps``, the picoseconds per pair of tokens that ``kvstore calibrate`` fits. Ranks that synchronize in each
step then compute for about equally long. vLLM fills a step in order of arrival, so a bound on its tokens is the paper's rule.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvclient import InvalidArgument
from kvclient.engines.vllm.quota.budget import prompt_tokens

logger = logging.getLogger(__name__)

_LOOK_AHEAD = 256
"""Waiting requests that a step is chosen from."""
_LOG_INTERVAL_S = 10.0


class _Quota:
    """Settings, and the bound of one step.

    Args:
        config: the additional settings.
        chunked: whether vLLM may cut a prompt; if not, a prompt longer than a step's bound would never be admitted.
    """

    least = 0
    """Tokens of a step even if they exceed the quota, so that prompts make progress."""

    def __init__(self, config: dict[str, Any], *, chunked: bool) -> None:
        values = [config.get(f"kvstore_attention_{name}", default) for name, default in (("quota_ms", 300.0), ("pair_ps", 0.0))]
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
            raise InvalidArgument("kvstore_attention_quota_ms and kvstore_attention_pair_ps must be numbers of at least 0")
        quota_ms, pair_ps = values
        self.most_pairs = quota_ms * 1e9 / pair_ps if quota_ms and pair_ps else math.inf
        if not chunked and self.most_pairs < math.inf:
            raise InvalidArgument(
                "the attention quota requires chunked prefill: enable it, or set kvstore_attention_quota_ms to 0"
            )
        if self.most_pairs == math.inf:
            logger.warning(
                "attention quota off: set kvstore_attention_quota_ms and kvstore_attention_pair_ps above 0"
                " (quota_ms=%s, pair_ps=%s)",
                quota_ms,
                pair_ps,
            )

    def tokens(self, scheduler: Scheduler) -> int:
        """Return the most tokens of the next step: one or more for each decoding request, and prompts within the quota."""
        decoding = 0
        known: list[tuple[int, int]] = []
        for request in scheduler.running:
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if request.num_computed_tokens < request.num_prompt_tokens:
                known.append((request.num_computed_tokens, left))
            else:
                decoding += max(0, left)
        waiting: list[int] = []
        queued = itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting)
        for request in itertools.islice(queued, _LOOK_AHEAD):
            if request.num_computed_tokens and not waiting:
                known.append((request.num_computed_tokens, request.num_tokens - request.num_computed_tokens))
            else:
                waiting.append(request.num_tokens)
        return decoding + prompt_tokens(known, waiting, self.most_pairs, self.least)


def _plain(config: object) -> dict[str, Any]:
    """Return the additional settings; vLLM also allows objects of platform plugins, which have none of ours."""
    return config if isinstance(config, dict) else {}


class QuotaScheduler(Scheduler):  # type: ignore[misc, unused-ignore]
    """vLLM's scheduler with a quota."""

    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # vLLM's
        """Create the scheduler; see vLLM's.

        Raises:
            InvalidArgument: an impossible setting, or a quota without chunked prefill.
        """
        chunked = bool(vllm_config.scheduler_config.enable_chunked_prefill)
        self.attention_quota = _Quota(_plain(vllm_config.additional_config), chunked=chunked)
        super().__init__(vllm_config, *args, **kwargs)
        self.attention_quota.least = self.block_size
        self.quota_cut_steps = 0
        """Steps that had fewer tokens than without the quota."""
        self._logged_s = -math.inf

    def schedule(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # vLLM's
        """Schedule a step of bounded tokens."""
        usual = self.max_num_scheduled_tokens
        if self.attention_quota.most_pairs == math.inf:
            return super().schedule(*args, **kwargs)
        self.max_num_scheduled_tokens = min(usual, self.attention_quota.tokens(self))
        bound = self.max_num_scheduled_tokens
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = usual
        if output.total_num_scheduled_tokens == bound < usual:
            self._record_cut(bound)
        return output

    def _record_cut(self, bound: int) -> None:
        """Count a step that the quota has cut, and log the count from time to time."""
        self.quota_cut_steps += 1
        if time.monotonic() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = time.monotonic()
            logger.info("steps cut by the attention quota (total=%d, last_bound_tokens=%d)", self.quota_cut_steps, bound)


class AsyncQuotaScheduler(QuotaScheduler, AsyncScheduler):  # type: ignore[misc, unused-ignore]
    """``QuotaScheduler`` for ``async_scheduling``, vLLM's default."""
