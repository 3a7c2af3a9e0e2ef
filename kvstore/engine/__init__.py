"""How long an engine computes: a roofline of prefill and decode, by model and GPU.

Pure: numbers in, seconds out. The simulator asks it for every step; a timed engine sleeps for what it says while the bytes
really move. ``Scale`` keeps both honest when the links are emulated and slow.
"""
