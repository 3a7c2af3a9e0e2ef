"""Timed engines: processes on a lab's hosts that compute in modelled time while every KV byte is really moved.

A prefill engine loads what hits, layer by layer where wanted, computes each layer for as long as the roofline says, and hands
each layer over to the decode host. A decode engine takes prompts when they are complete, steps its batch in modelled time, and
stores each block that fills. Payloads follow from keys, so both check every block that they were given.

Spoken to by JSON lines: commands on standard input, events on standard output. Times are of the monotonic clock, which all hosts
of a lab share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.roofline.engine_model import EngineModel, Scale
from kvstore.roofline.hardware import gpu_named
from kvstore.roofline.models import model_named
from kvstore.workload.payload import Payloads
from netlab.agents import Chains
from netlab.decode_engine import DecodeEngine
from netlab.prefill_engine import PrefillEngine
from netlab.routing import Routing
from netlab.stepping import Speaker

STORE_BLOCKS = 256
STORE_S = 60.0


def engine_model(settings: dict[str, Any]) -> EngineModel:
    """From its settings: model, gpu, gpus, dilation, bytes."""
    scale = Scale(settings["dilation"], settings["bytes"])
    return EngineModel(model_named(settings["model"]), gpu_named(settings["gpu"]), settings["gpus"], settings["gpus"], scale)


def store_contexts(client: KVClient, chains: Chains, agents: int) -> int:
    """Store the blocks that a run expects in storage; returns the blocks once all are durable."""
    import numpy as np  # only this role needs space of its own

    payloads = Payloads(client.spec.block_bytes)
    space = np.zeros((STORE_BLOCKS, client.spec.block_bytes), np.uint8)
    stored = 0
    for agent in range(agents):
        keys = chains.stored(agent)
        for at in range(0, len(keys), STORE_BLOCKS):
            part = keys[at : at + STORE_BLOCKS]
            payloads.fill(part, space[: len(part)])
            parent = keys[at - 1] if at else None
            result = client.store(part, space[: len(part)], parent=parent, depth=at, durable=True, deadline_s=STORE_S)
            if not result.durable or result.held_blocks != len(part):
                raise SystemExit(f"only {result.held_blocks} of {len(part)} blocks were stored: {result.error}")
            stored += len(part)
    return stored


def main() -> None:
    """Command line: the file with the settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path)
    parser.add_argument("role", choices=("prefill", "decode", "store", "route"))
    parser.add_argument("node", help="address of the node on this host; a router has none")
    parsed = parser.parse_args()
    settings = json.loads(parsed.settings.read_text(encoding="utf-8"))
    spec = CacheSpec(**settings["spec"])
    chains = Chains(spec, settings["seed"], settings["contexts"])
    options = ClientOptions(client_name=f"{parsed.role}-{os.getpid()}", workers=32, max_pending=256, default_deadline_s=STORE_S)
    speaker = Speaker(sys.stdout)
    if parsed.role == "route":
        obey(Routing(settings["metadata"], settings["groups"], speaker), speaker)
        return
    with KVClient.connect(settings["metadata"], spec, node=parsed.node, options=options) as client:
        if parsed.role == "store":
            speaker.say(did="stored", blocks=store_contexts(client, chains, len(settings["contexts"])))
            return
        model = engine_model(settings["engine"])
        make = PrefillEngine if parsed.role == "prefill" else DecodeEngine
        obey(make(client, chains, model, settings, speaker), speaker)


def obey(one: PrefillEngine | DecodeEngine | Routing, speaker: Speaker) -> None:
    """Takes commands until there are no more."""
    speaker.say(did="ready")
    for line in sys.stdin:
        one.do(json.loads(line))
    one.close()


if __name__ == "__main__":
    main()
