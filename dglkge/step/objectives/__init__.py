"""Objectives: from the rows of a batch to its loss and gradients, with negatives or over all candidates."""
