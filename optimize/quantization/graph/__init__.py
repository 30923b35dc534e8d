"""Nodes of a traced network, and how they are edited: what every rewrite of the quantizing passes uses.

In: an FX graph module. Does: finds nodes, their layers, readers and quantizers; inserts and replaces.
Out: the same module, edited in place.
"""
