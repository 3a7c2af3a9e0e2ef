"""Dual-path loading: path planner, request scheduler and bounds.

Pure code: no I/O, no threads, no clock. ``now`` is always an argument, in seconds of any monotonic clock. The metadata server,
the simulator and the tests each create instances, and make the same decisions.
"""
