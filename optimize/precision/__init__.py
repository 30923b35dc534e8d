"""Precision layer by layer.

In: a float module and its session. It quantizes single layers, or all but some, and measures each such trial as every
artifact is measured. Out: how much each layer costs and wins, or the precision of each that a budget asks for.
"""
