"""Measure a latency-critical flow that shares an emulated compute link with KV traffic, with and without a traffic class.

Real servers and clients run in network namespaces with shaped links, and loaded bytes are checked. Requires root and iproute2,
and reports if they are missing.
"""

from __future__ import annotations

from netlab.traffic_class import main

if __name__ == "__main__":
    main(__doc__)
