"""HTTP routes of the admin REST API, by topic."""
