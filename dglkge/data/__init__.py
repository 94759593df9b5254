"""Files and ids: vocabularies, triples, the dataset folder and its partitions. No DGL."""
