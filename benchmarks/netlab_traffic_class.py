"""A latency-critical flow beside KV on one emulated compute link: its latency and KV's rate, with a traffic class and without.

Real daemons and clients run in network namespaces whose links are shaped; loaded bytes are checked. Needs root and iproute2 and
says so where it cannot run.
"""

from __future__ import annotations

from netlab.traffic_class import main

if __name__ == "__main__":
    main(__doc__)
