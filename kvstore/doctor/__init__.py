"""Host checks of ``kvstore doctor``: collect facts, derive findings, propose a fix for each problem. Read-only."""
