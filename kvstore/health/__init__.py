"""Health of a store: codes, findings, and the rules that derive findings from reports of the servers."""
