"""Loads over the storage links of prefill and decode hosts, on emulated links: rates, single loads, layer groups, faults.

Real daemons and clients run in network namespaces whose links are shaped; every loaded byte is checked. Needs root and iproute2
and says so where it cannot run. Figures are ratios of policies that ran in turn on the same bed.
"""

from __future__ import annotations

from netlab.loads import main

if __name__ == "__main__":
    main(__doc__)
