"""Conformance suites, fault wrappers and the cluster launcher: public, so that a third party can prove its own parts."""
