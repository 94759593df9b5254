"""Order of the triples, batches of edges and of queries, and negatives."""
