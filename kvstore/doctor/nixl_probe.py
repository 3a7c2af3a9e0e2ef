"""Probe: whether a node could set up NIXL. Runs in a separate process, because the libraries may crash it.

``python -m kvstore.doctor.nixl_probe DEVICES TRANSPORTS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from kvstore.core.errors import Unsupported
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions


def main(devices: str, transports: str) -> None:
    """Open an agent on memory without data, close it, and print one JSON object."""
    port = NixlAgent(NixlOptions(devices=devices, transports=transports, bounce_bytes=1 << 20), name="doctor")
    why = ""
    try:
        port.open()
    except Unsupported as error:
        why = str(error)
    port.close()
    print(json.dumps({"works": not why, "why": why}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
