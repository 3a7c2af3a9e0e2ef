"""Moves blocks between nodes, and between a node and the engines that use it.

``contract`` defines what a transport is. ``tcp`` is the framed TCP transport, ``nixl`` moves its payload by one-sided transfers,
``shm`` shares a node's arena with the engines of its host, and ``shaping`` marks and caps the traffic.
"""
