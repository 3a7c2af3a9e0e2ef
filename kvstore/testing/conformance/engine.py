"""A vLLM engine with any KV connector, in a child process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvstore.testing.connector.driver import EngineAnswer, StoreAddress

TRANSFER: Final = "kv_transfer_config"
"""Option of ``open``: vLLM's configuration of the connector."""
_CACHE_BYTES = 48 << 20
_MOST_TOKENS = 1_024
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class ConnectorDriver:
    """Opens engines; see ``HookDriver``.

    Attributes:
        model: its folder.
        block_tokens: tokens per block.
        dtype: of weights and KV.
        log: receives what engines print.
    """

    model: Path
    block_tokens: int = 32
    dtype: str = "float32"
    log: Path = Path(os.devnull)

    def open(self, _store: StoreAddress | None, options: Mapping[str, object]) -> ConnectorEngine:
        """Open a new engine in this process, which is a child. Without ``TRANSFER`` among the options, it is the engine alone."""
        with self.log.open("ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more: dict[str, Any] = {}
        if transfer := options.get(TRANSFER):
            if "lmcache" in str(transfer):
                hide_dict_of_llvmlite()
            more[TRANSFER] = KVTransferConfig(**transfer)  # type: ignore[arg-type]
        llm = LLM(
            model=str(self.model),
            enforce_eager=True,
            enable_prefix_caching=True,
            dtype=self.dtype,
            block_size=self.block_tokens,
            max_model_len=_MOST_TOKENS,
            max_num_seqs=8,
            kv_cache_memory_bytes=_CACHE_BYTES,
            seed=0,
            **more,
        )
        return ConnectorEngine(llm)


class ConnectorEngine:
    """An engine; see ``HookEngine``."""

    def __init__(self, llm: Any) -> None:  # noqa: ANN401  # vLLM's
        self._llm = llm

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        """Return greedy answers, all computed at once."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        answers = self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [EngineAnswer(tuple(one.outputs[0].token_ids), int(one.num_cached_tokens or 0)) for one in answers]

    def flush(self, timeout_s: float) -> bool:
        """Step until the connector has handed over what was generated, as far as vLLM knows."""
        core = self._llm.llm_engine.engine_core.engine_core
        has_work = getattr(core.scheduler.connector, "has_pending_push_work", lambda: False)
        end_s = time.monotonic() + timeout_s
        while has_work():
            if time.monotonic() > end_s:
                return False
            self._llm.llm_engine.step()
            time.sleep(_PAUSE_S)
        return True

    def forget(self) -> None:
        """Drop what the engine itself has cached on the device."""
        self._llm.reset_prefix_cache()

    def counters(self) -> Mapping[str, int]:
        """Return nothing: each connector has different counters."""
        return {}

    def close(self) -> None:
        """Stop the engine gracefully, so that another one may begin."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self._llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self._llm
        cleanup_dist_env_and_memory()


def hide_dict_of_llvmlite() -> None:
    """Let vLLM start on a CPU after LMCache has loaded numba.

    vLLM reads ``__dict__`` of everything in all modules. For llvmlite's library this is a function, at which vLLM fails.
    """
    with suppress(ImportError):
        library = type(import_module("llvmlite.binding.ffi").lib)
        found = library.__getattr__
        if getattr(found, "hides_dict", False):
            return

        def hide_dict(lib: Any, name: str) -> Any:  # noqa: ANN401
            if name == "__dict__":
                raise AttributeError(name)
            return found(lib, name)

        hide_dict.hides_dict = True  # type: ignore[attr-defined]
        library.__getattr__ = hide_dict
