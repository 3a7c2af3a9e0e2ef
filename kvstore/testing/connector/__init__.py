"""Conformance kit of engine connectors."""
