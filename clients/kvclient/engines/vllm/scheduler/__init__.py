"""The scheduler side: which blocks are loaded and stored in each step."""
