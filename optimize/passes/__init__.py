"""The passes, one file each. `base` has their interface.

In: an artifact and a typed config. Does: one transformation. Out: the files of a new artifact.
"""
