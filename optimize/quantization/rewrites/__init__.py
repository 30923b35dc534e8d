"""Rewrites operators that torch.ao quantizes wrongly or not at all as others that it can. One file for each kind.

In: a traced float network, before torch.ao prepares it. Does: replaces nodes by others that give the same numbers. Out:
the same module, edited in place.
"""
