"""Commands that run a daemon in the foreground."""
