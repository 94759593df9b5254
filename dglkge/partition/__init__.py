"""Triples to a data set folder with DGL partitions: offline, on one machine, with no server."""
