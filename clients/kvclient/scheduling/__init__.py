"""Requests of a router to the scheduler of the metadata server."""
