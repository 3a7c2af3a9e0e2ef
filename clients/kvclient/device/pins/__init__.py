"""Pinning of arenas for the device's DMA."""
