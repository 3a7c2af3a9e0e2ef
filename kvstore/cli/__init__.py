"""The command line ``kvstore``: the only place that reads the environment and wires objects together."""

from kvstore.cli.app import main

__all__ = ["main"]
