"""Processes: the rank of this one in its job, start and stop of DGL and torch.distributed."""
