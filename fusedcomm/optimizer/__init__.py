"""The optimizer whose ranks own parts of the parameters."""
