"""Fixtures of the router's tests."""

from router_bed import bed

__all__ = ["bed"]
