"""What one process group agrees on and keeps for the buckets of its parameters."""
