"""Loads: their sources, plans, layer-wise progress and results."""
