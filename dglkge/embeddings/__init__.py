"""Embedding tables: rows served by DGL's kvstore and read through shared memory."""
