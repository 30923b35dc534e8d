"""What is known of an artifact because it was measured.

In: artifacts, a context, a store. Does: opens each by every execution, each in a process of its own that takes turns.
Out: accuracy, latency, footprint, parity, each with its provenance.
"""
