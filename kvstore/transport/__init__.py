"""Moves blocks between nodes, and between a node and the engines beside it: TCP, and shared memory."""
