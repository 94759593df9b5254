"""Shared code of the benchmarks of this folder: watching processes, the product limit, peers, tables."""
