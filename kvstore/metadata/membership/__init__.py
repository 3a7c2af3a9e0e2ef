"""Nodes of the cluster: registrations, heartbeats, liveness, drain orders."""
