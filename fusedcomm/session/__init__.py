"""Sessions: one engine on one process group, with its parameters, plan, statistics and state."""
