"""What is known of an artifact because it was measured.

In: artifacts, a context, a store. Does: runs each through the serving runtime and takes times in turns.
Out: accuracy, latency, footprint, parity, each with its provenance.
"""
