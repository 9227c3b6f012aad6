"""The front end for DistributedDataParallel."""
