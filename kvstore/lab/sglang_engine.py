"""SGLang's whole engine on a CPU, with HiCache: ``sglang.launch_server`` with stubs of kernels that CPU builds lack.

    python -m kvstore.lab.sglang_engine --model-path FOLDER --device cpu --attention-backend torch_native …

Attention, layers and sampling are SGLang's own code for torch. SGLang's scheduler and detokenizer are separate processes. Here
they are forked instead of spawned (the server has one thread by then), so all have the stubs and SGLang is imported once. The
model's architecture must not need SGLang's kernels: Llama does not.

``SGLangSpec`` is its configuration for an ``EngineBed``:

    engine = bed.start(SGLangSpec("engine", model, store=hicache_store(cluster.metadata_address, node.local_socket)))
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.errors import InvalidArgument
from kvstore.lab import sglang_copies, sglang_kernels
from kvstore.lab.engine_bed import ServedEngine, ServeSpec

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health answers without computing
    "TRANSFORMERS_OFFLINE": "1",
}
_ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--random-seed", "0")


def hicache_store(metadata: str, node: str = "auto", **options: object) -> dict[str, Any]:
    """Build ``--hicache-storage-backend-extra-config`` of our backend: pages are chained, and prompts of a page are looked for.

    Args:
        metadata: address of the metadata server.
        node: address of this engine's node; see ``HookOptions.node``.
        options: further options of the backend, and SGLang's own keys.
    """
    return {
        "backend_name": "kvstore",
        "module_path": "kvclient.engines.sglang.backend",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 1,
        "metadata": metadata,
        "node": node,
        **options,
    }


@dataclass(frozen=True, slots=True)
class SGLangSpec(ServeSpec):
    """Configuration of one SGLang server; ``store`` is ``hicache_store``, and ``kv_cache_bytes`` has no effect."""

    def command(self, port: int) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", __name__, "--host", self.host, "--port", str(port), *_ON_CPU]
        command += ["--model-path", str(self.model), "--served-model-name", self.served_name, "--dtype", self.dtype]
        command += ["--context-length", str(self.max_tokens), "--page-size", str(self.block_tokens)]
        command += ["--max-total-tokens", str(2 * self.max_tokens), "--max-running-requests", "8", "--skip-server-warmup"]
        if self.store is not None:
            command += ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", "page_first"]
            command += ["--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"]
            command += ["--hicache-storage-backend", "dynamic"]
            command += ["--hicache-storage-backend-extra-config", json.dumps(self.store)]
        return [*command, *self.arguments]

    def variables(self) -> dict[str, str]:
        """The environment."""
        return {**ServeSpec.variables(self), **_ENVIRONMENT, **self.environment}


@dataclass(frozen=True, slots=True)
class SGLangAnswer:
    """A greedy answer.

    Attributes:
        tokens: generated tokens.
        cached_tokens: tokens of the prompt that were not computed.
        stored_tokens: those of them that SGLang loaded from its storage backend for this request.
    """

    tokens: tuple[int, ...]
    cached_tokens: int
    stored_tokens: int


def generate(engine: ServedEngine, prompt: Sequence[int], max_tokens: int) -> SGLangAnswer:
    """Ask a served SGLang engine for a greedy answer to tokens.

    Raises:
        Unavailable: no answer.
        InvalidArgument: an answer other than 200.
    """
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    status, body = engine.call("POST", "/generate", {"input_ids": list(prompt), "sampling_params": sampling})
    if status != 200:
        raise InvalidArgument("the engine refuses", status=status, answer=body[:500].decode(errors="replace"))
    answer = json.loads(body)
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return SGLangAnswer(tuple(answer["output_ids"]), meta["cached_tokens"], details.get("storage", 0))


def flush_cache(engine: ServedEngine) -> None:
    """Make a served SGLang engine forget what it cached in device and host memory.

    Raises:
        InvalidArgument: it does not, because requests are running.
    """
    status, body = engine.call("POST", "/flush_cache?timeout=10")
    if status != 200:
        raise InvalidArgument("the engine does not flush its cache", status=status, answer=body[:200].decode())


def main() -> None:
    """Serve, with the arguments of ``sglang.launch_server``."""
    os.environ.update(_ENVIRONMENT)
    sglang_kernels.install()
    for patch in sglang_copies.patches():
        patch.start()
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_method("fork" if method == "spawn" else method, force)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
