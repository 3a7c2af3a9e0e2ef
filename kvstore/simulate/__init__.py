"""Simulator of a cluster: discrete events, the store's own planner and scheduler, and links as fluids.

Requests are events, bytes are not: every transfer is a flow with its max-min fair share of its links. The event loop is our own
heap: the end of a flow moves whenever another flow begins, and process-based libraries cannot reschedule events.
"""
