"""A client, run as a process on a host of a lab: looks a stored chain up for some seconds, and prints the result."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from store_engine import BLOCKS, SPEC

from kvclient import ClientOptions, KVClient
from kvstore.observe.metric_definitions import client as client_metrics


def main(metadata: str, seconds: str) -> None:
    calls, slowest_s, fewest = 0, 0.0, BLOCKS
    with KVClient.connect(metadata, SPEC, options=ClientOptions(client_name="caller")) as client:
        keys = client.keys(np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32))
        print(json.dumps({"hits": client.lookup(keys).hit_blocks}), flush=True)
        until_s = time.monotonic() + float(seconds)
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            fewest = min(fewest, client.lookup(keys).hit_blocks)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            calls += 1
            time.sleep(0.005)
        failed = client.stats().get(client_metrics.LOOKUPS_FAILED, 0)
    print(json.dumps({"calls": calls, "failed": failed, "fewest": fewest, "slowest_ms": round(slowest_s * 1_000)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
