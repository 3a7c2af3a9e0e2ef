"""Load or recompute: predicts the time to load found blocks and the time to compute them, and chooses the faster way.

Pure: samples and requests in, estimates and verdicts out. Times are in seconds. The caller measures.
"""
