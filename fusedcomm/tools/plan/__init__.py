"""``fusedcomm plan``: predicts step times on a cluster without running anything there."""
