"""Offline, on one machine, with no server: triples to a dataset folder with DGL partitions."""
