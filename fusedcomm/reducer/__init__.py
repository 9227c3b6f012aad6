"""The front end for training without DistributedDataParallel."""
