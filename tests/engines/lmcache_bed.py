"""LMCache's objects and a controller's view of the adapter. As a script: a vLLM engine with LMCache's connector."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from kvstore.embedded.children import die_with_parent
from kvstore.testing.conformance.engine import hide_dict_of_llvmlite
from kvstore.testing.connector.driver import StoreAddress

WAIT_S = 30.0
STARTED_S = 120.0
CHUNK_TOKENS = 64
SHAPE = (2, 3, CHUNK_TOKENS, 32)
"""KV, layers, tokens, width of the objects."""


def object_keys(count: int, seed: int = 1, **parts: Any) -> list[Any]:
    """Keys of LMCache; different for each seed."""
    from lmcache.v1.distributed.api import ObjectKey

    draw = np.random.default_rng(seed)
    given = {"model_name": "tiny/model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **parts}
    return [ObjectKey(chunk_hash=draw.bytes(32), **given) for _ in range(count)]


def layout(dtype: str = "bfloat16", shape: Sequence[int] = SHAPE) -> Any:
    """Layout of a group of objects, as LMCache states it."""
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[getattr(torch, dtype)])


def memory_objects(count: int, seed: int | None = None, dtype: str = "bfloat16", shape: Sequence[int] = SHAPE) -> list[Any]:
    """Memory objects of LMCache with random bytes; seed None: zeros."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    kind = getattr(torch, dtype)
    size = int(np.prod(shape)) * kind.itemsize
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        raw = torch.from_numpy(np.zeros(size, np.uint8) if seed is None else np.frombuffer(draw.bytes(size), np.uint8).copy())
        meta = MemoryObjMetadata(
            shape=torch.Size(shape),
            dtype=kind,
            address=0,
            phy_size=size,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[torch.Size(shape)],
            dtypes=[kind],
        )
        made.append(TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None))
    return made


def content(objects: Sequence[Any]) -> list[bytes]:
    """Bytes of objects."""
    return [bytes(one.byte_array) for one in objects]


class Controller:
    """Calls an adapter as LMCache's controllers do: submit a task, wait for its event, fetch its result.

    Args:
        store: addresses of the store.
        options: of the adapter.
    """

    def __init__(self, store: StoreAddress, options: Mapping[str, Any] = {}) -> None:
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        params = {"metadata": store.metadata, "node": store.node, "chunk_tokens": CHUNK_TOKENS, "weights_epoch": "1", **options}
        given = {"module_path": "kvclient.engines.lmcache", "class_name": "KVStoreL2Adapter", "adapter_params": params}
        self.adapter: Any = create_l2_adapter(PluginL2AdapterConfig.from_dict(given))
        self._stored: dict[int, Any] = {}

    @staticmethod
    def _wait(fd: int, end_s: float) -> None:
        from lmcache.v1.platform import consume_fd

        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if poller.poll(max(1.0, (end_s - time.monotonic()) * 1000)):
            consume_fd(fd)
        assert time.monotonic() < end_s, "the task has not ended"

    def stored(self, number: int) -> Any:
        """The result of a store task."""
        end_s = time.monotonic() + WAIT_S
        while number not in self._stored:
            self._stored |= self.adapter.pop_completed_store_tasks()
            if number not in self._stored:
                self._wait(self.adapter.get_store_event_fd(), end_s)
        return self._stored.pop(number)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        """Store objects, and wait."""
        return self.stored(self.adapter.submit_store_task(list(keys), list(objects)))

    def find(self, keys: Sequence[Any], stated: Mapping[int, Any] | None = None) -> list[int]:
        """Positions of the objects that a lookup finds."""
        number = self.adapter.submit_lookup_and_lock_task(list(keys), {0: layout()} if stated is None else dict(stated))
        end_s = time.monotonic() + WAIT_S
        while (found := self.adapter.query_lookup_and_lock_result(number)) is None:
            self._wait(self.adapter.get_lookup_and_lock_event_fd(), end_s)
        return list(found.get_indices_list())

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[int]:
        """Load objects, and return the positions of those that arrived."""
        number = self.adapter.submit_load_task(list(keys), list(objects))
        end_s = time.monotonic() + WAIT_S
        while (found := self.adapter.query_load_result(number)) is None:
            self._wait(self.adapter.get_load_event_fd(), end_s)
        return list(found.get_indices_list())

    def counts(self) -> dict[str, int]:
        """Of the adapter."""
        return dict(self.adapter.counters.totals())


@contextmanager
def controller(store: StoreAddress, options: Mapping[str, Any] = {}) -> Iterator[Controller]:
    """An adapter for the duration of the ``with`` statement."""
    made = Controller(store, options)
    try:
        yield made
    finally:
        made.adapter.close()


# ---- a whole LMCache ----
@contextmanager
def lmcache_server(store: StoreAddress, ports: Sequence[int], log: Path) -> Iterator[str]:
    """LMCache's server with the adapter; yields the address of its HTTP server."""
    adapter = {
        "type": "plugin",
        "module_path": "kvclient.engines.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {
            "metadata": store.metadata,
            "node": store.node,
            "chunk_tokens": CHUNK_TOKENS,
            "weights_epoch": "1",
        },
    }
    flags = {
        "host": "127.0.0.1",
        "port": ports[0],
        "http-host": "127.0.0.1",
        "http-port": ports[1],
        "prometheus-port": ports[2],
        "l1-size-gb": 0.1,
        "eviction-policy": "LRU",
        "chunk-size": CHUNK_TOKENS,
        "supported-transfer-mode": "engine_driven",
        "l2-adapter": json.dumps(adapter),
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--no-l1-use-lazy", *arguments]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with_parent)
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        end_s = time.monotonic() + STARTED_S
        while not _answers(address):
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end_s, "LMCache has not started"
            time.sleep(0.1)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(address: str) -> bool:
    try:
        return bool(status(address)["is_healthy"])
    except OSError:
        return False


def status(address: str) -> dict[str, Any]:
    """Status of LMCache's server."""
    with urlopen(f"{address}/status", timeout=WAIT_S) as answer:
        return dict(json.load(answer))


def adapter_status(address: str) -> dict[str, Any]:
    """Status of the adapter in a server."""
    adapters = status(address)["storage_manager"]["l2_adapters"]
    return next(dict(one) for one in adapters if one["type"] == "KVStoreL2Adapter")


def ask(model: Path, port: int | None, prompts: Path) -> list[tuple[list[int], int]]:
    """Answers of a vLLM engine in a separate process, each with the tokens that were not computed.

    Args:
        model: its folder.
        port: of LMCache's server; None: without LMCache.
        prompts: a file with them.
    """
    command = [sys.executable, __file__, str(model), str(port or 0), str(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STARTED_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(tokens, cached) for tokens, cached in json.loads(done.stdout.splitlines()[-1])]


def main(model: str, port: int, prompts: str) -> None:
    """Answer prompts with vLLM and print tokens and cached tokens."""
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    hide_dict_of_llvmlite()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    more = {}
    if port:
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        )
    llm = LLM(
        model=model,
        enforce_eager=True,
        seed=0,
        dtype="float32",
        block_size=32,
        max_model_len=2048,
        kv_cache_memory_bytes=32 << 20,
        **more,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for prompt in json.loads(Path(prompts).read_text()):
        answer = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        answers.append((list(answer.outputs[0].token_ids), int(answer.num_cached_tokens or 0)))
    print(json.dumps(answers), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
