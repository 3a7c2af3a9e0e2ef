"""What everything speaks in: keys, types, errors, configuration, limits. Pure: no I/O, no torch."""
