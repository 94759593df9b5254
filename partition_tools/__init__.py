"""Scripts of the offline tools: they parse arguments and call ``dglkge.partition``."""
