"""Names and layouts of other programs for what ``model`` computes."""
