"""Run agents on timed engines over emulated links: job completion offline, agents per second online, and the gain of each step.

Computing time comes from a model of the hardware. The real client moves every KV byte between real servers in network namespaces
with shaped links, and every byte is checked. Requires root and iproute2, and reports if they are missing.
"""

from __future__ import annotations

from netlab.engine_runs import main

if __name__ == "__main__":
    main(__doc__)
