"""Where to read, and who computes: path planner, request scheduler and bounds of dual-path loading.

Pure code: no I/O, no threads, no clock. ``now`` is an argument everywhere, in seconds of any monotonic clock. The metadata
server, the simulator and the tests each own instances, and run the same decisions.
"""
