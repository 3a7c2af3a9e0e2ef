"""Commands that run or simulate a workload."""
