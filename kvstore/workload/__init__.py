"""Workloads: recorded and generated requests, their block keys, payloads that can be checked, and the bounds of any cache."""
