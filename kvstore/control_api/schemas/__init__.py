"""JSON schemas of the control API: what queries return and commands accept."""
