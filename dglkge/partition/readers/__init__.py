"""Readers of input formats other than tables: RDF, GraphML and the folders of other projects. No DGL."""
