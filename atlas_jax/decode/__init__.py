"""Draft, verify, accept: one jitted program per bucket, and the engine that drives it."""
