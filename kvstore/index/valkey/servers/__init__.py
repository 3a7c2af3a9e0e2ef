"""Observation of the servers of a cluster."""
