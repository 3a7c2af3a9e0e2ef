"""Agents on timed engines over emulated links: job completion offline, agents a second online, and the gain of each step.

Engines compute for as long as a model of the hardware says, while every KV byte is really moved by the real client between the
real daemons in network namespaces with shaped links, and checked. Needs root and iproute2, and says so where it cannot run.
"""

from __future__ import annotations

from netlab.engine_runs import main

if __name__ == "__main__":
    main(__doc__)
