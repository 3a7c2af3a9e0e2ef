"""The prefix index: which volumes hold which keys, and how long a prefix can be served."""
