"""``fusedcomm plan``: step times predicted on paper."""
