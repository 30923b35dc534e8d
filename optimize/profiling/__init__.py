"""Where an artifact's time goes, layer by layer, as each engine itself tells it.

In: an artifact's folder and what runs it. Does: has the engine measure its layers, in a process of its own, and sets
them beside their MACs, their bytes and what this machine can do. Out: a record, a table, a chart, a trace.
"""
