"""The command line ``kvstore``: the only place that reads the environment and wires objects together."""

from kvstore.rpc.io_engine import wait_in_callers_threads

wait_in_callers_threads()  # before anything imports gRPC

from kvstore.cli.app import main  # noqa: E402

__all__ = ["main"]
