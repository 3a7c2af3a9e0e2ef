"""JSON schemas of the control API: results of queries and arguments of commands."""
