"""Networks of several hosts on one machine: network namespaces, shaped links and traffic counters."""
