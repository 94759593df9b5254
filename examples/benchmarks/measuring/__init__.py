"""What the benchmarks of this folder share: watching processes, the product limit, peers, tables."""
