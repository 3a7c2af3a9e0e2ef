"""Conformance suites, models and fault injection: public, so that third parties can test their own implementations."""
