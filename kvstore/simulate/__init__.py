"""What a cluster would gain: discrete events over the store's own planner and scheduler, links as fluid.

Requests are events; bytes are not: every transfer is a flow that has its max-min fair share of the links it uses. The event
loop is a heap of our own: a flow's end moves whenever another begins, and process-based libraries cannot move what was scheduled.
"""
