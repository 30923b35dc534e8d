"""Profiles an artifact layer by layer, from the measurements of each engine itself.

Input: an artifact's folder and its executions. Does: lets the engine measure its layers in its own process, and
compares them with their MACs, their bytes and the machine's peaks. Output: a record, a table, a chart, a trace.
"""
