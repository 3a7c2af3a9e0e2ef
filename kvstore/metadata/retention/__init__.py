"""Quotas, retention rules and tenants: what operators set and what each node is told."""
