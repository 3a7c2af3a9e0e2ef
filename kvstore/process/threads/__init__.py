"""Work for threads that may not start."""
