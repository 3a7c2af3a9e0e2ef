"""Shared parts of the commands: options, configuration, output, logging, connections."""
