"""The passes, one file each; `base` holds what they have in common.

In: an artifact and a typed config. Does: one transformation. Out: the files of a new artifact.
"""
