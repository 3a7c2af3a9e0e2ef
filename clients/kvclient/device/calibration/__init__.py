"""Calibration of copy strategies at the start of an engine: trial copies, and the choice that follows from their rates."""
