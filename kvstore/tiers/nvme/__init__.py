"""Volumes on NVMe: one slab file of slots, its catalog, and the manifest that other nodes read."""
