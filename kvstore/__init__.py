"""The tiered KV-cache store: metadata server, node daemon, tiers, transports, command line."""

__version__ = "0.2.0"
