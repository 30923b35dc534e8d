"""Precision layer by layer.

In: a float module and its session. Does: quantizes single layers, or all but some, and measures each trial as every
artifact is measured. Out: how much each layer costs and gains, or the precision of each layer for a budget.
"""
