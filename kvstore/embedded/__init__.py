"""A whole store on one machine, as child processes: the base of `kvstore up`, the demo and replays."""
