"""Operators that torch.ao does not quantize, or quantizes wrongly, written as others that it does: one file a kind.

In: a traced float network, before torch.ao prepares it. Does: replaces nodes by others that give the same numbers.
Out: the same module, edited in place.
"""
