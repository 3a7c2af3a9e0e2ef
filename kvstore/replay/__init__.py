"""Workloads run against a real store through the client: replay of traces, and the demo. Every loaded byte is checked."""
