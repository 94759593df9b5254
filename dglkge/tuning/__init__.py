"""Search for settings: trials on subgraphs and few epochs first, the best on the whole graph."""
