"""Generated from proto/kvstore by scripts/generate_stubs.py: do not edit."""
