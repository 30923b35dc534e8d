"""Finds and edits nodes of a traced network. Every rewrite of the quantizing passes uses it.

In: an FX graph module. Does: finds nodes, their layers, readers and quantizers, and replaces them. Out: the same
module, edited in place.
"""
