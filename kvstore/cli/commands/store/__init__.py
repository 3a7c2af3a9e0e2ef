"""Commands that inspect and change a running store."""
