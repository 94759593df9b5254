"""What training measures: losses, buckets, held-out triples, and who is told."""
