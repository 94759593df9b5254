"""Processes: who I am among them, and how DGL and torch.distributed are started and stopped."""
