"""An engine, run as a process on a host of a lab: ``put`` stores a chain of blocks, ``get`` loads and checks it."""

from __future__ import annotations

import json
import sys

import numpy as np

from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.workload.payload import Payloads

SPEC = CacheSpec(model="lab", block_tokens=16, layers=4, layer_block_bytes=64 << 10)
BLOCKS = 64


def main(what: str, metadata: str, local: str, deadline_s: str = "20") -> None:
    keys_of = np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)
    payloads = Payloads(SPEC.block_bytes)
    data = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    with KVClient.connect(metadata, SPEC, node=local, options=ClientOptions(client_name=what)) as client:
        keys = client.keys(keys_of)
        if what == "put":
            payloads.fill(keys, data)
            client.store(keys, data, wait_visible=True)
            print(json.dumps({"stored": BLOCKS}))
            return
        result = client.load(keys, data, deadline_s=float(deadline_s))
        hits = np.flatnonzero(result.outcomes == 1)
        wrong = payloads.wrong_blocks([keys[position] for position in hits], data[hits])
        print(json.dumps({"hits": len(hits), "wrong": len(wrong)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
