"""Tenants, quotas and retention rules: operator settings, and their enforcement data for each node."""
