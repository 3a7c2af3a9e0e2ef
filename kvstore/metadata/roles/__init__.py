"""Roles: work that one of several metadata servers does for all of them."""
