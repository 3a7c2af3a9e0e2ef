"""Measure loads over the emulated storage links of prefill and decode hosts: rates, single loads, layer groups, faults.

Real servers and clients run in network namespaces with shaped links, and every loaded byte is checked. Figures are ratios of
policies that ran alternately on the same bed. Requires root and iproute2, and reports if they are missing.
"""

from __future__ import annotations

from netlab.loads import main

if __name__ == "__main__":
    main(__doc__)
