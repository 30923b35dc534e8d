"""Measures artifacts.

Input: artifacts, a context, a store. Does: opens each artifact with every execution, each in its own process, and lets
the processes take turns. Output: accuracy, latency, footprint and parity, each with its provenance.
"""
