"""HTTP routes of the router."""
