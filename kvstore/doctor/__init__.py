"""What this host has, what of it is in use, what is missing and what mends it: facts in, findings out. Nothing is changed."""
