"""Compute times of engines: a roofline of prefill and decode, by model and GPU.

Pure: numbers in, seconds out. The simulator calls it for every step; a timed engine sleeps for the result while the bytes
really move. ``Scale`` adapts both to emulated, slow links.
"""
