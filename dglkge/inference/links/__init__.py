"""Likely links of a trained model: completion of the graph, indexes, and curves of links of questions."""
