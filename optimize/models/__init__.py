"""Where a network comes from and what it wants to see.

In: a name, a file, a checkpoint. Does: finds, builds, loads, refuses with the reason.
Out: a module with its weights, and its preprocessing.
"""
