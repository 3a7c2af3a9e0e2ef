"""How the network treats KV traffic: DSCP marks and a bandwidth cap."""
