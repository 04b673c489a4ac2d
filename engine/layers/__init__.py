"""Pieces of a model that are ours: attention over the paged KV cache."""
