"""Versioned checkpoints in PyTorch-BigGraph's layout, by original entity ids."""
