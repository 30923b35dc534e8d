"""What runs a model file, one file for each engine; `base` holds what they have in common.

In: a verified artifact folder and where to run it. Does: opens it, truthfully. Out: batches to logits.
"""
