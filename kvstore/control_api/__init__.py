"""Queries and commands for a running store, shared by the admin server and the command line. Independent of HTTP."""
