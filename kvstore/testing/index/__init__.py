"""Conformance kit of prefix indexes."""
