"""Whether NIXL can be set up as a node would; a process of its own, because its libraries may end it.

``python -m kvstore.doctor.nixl_probe DEVICES TRANSPORTS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from kvstore.core.errors import Unsupported
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions


def main(devices: str, transports: str) -> None:
    """Prints one JSON object. Opens an agent, with nothing of value in its memory, and ends it."""
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
