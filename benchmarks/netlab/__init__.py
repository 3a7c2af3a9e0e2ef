"""Loads over emulated storage and compute links: real daemons on the hosts of a network lab, driven by real clients."""
