"""Simulated links: the event loop, fluid flows and the byte accounting of both read paths."""
