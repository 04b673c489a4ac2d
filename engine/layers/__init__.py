"""What is ours around a model's modules.

Attention over the paged KV cache, the split of linear layers over ranks, and from logits to tokens.
"""
