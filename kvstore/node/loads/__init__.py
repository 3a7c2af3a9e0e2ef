"""Loads: from DRAM, volumes, mounts and other nodes into the arena."""
