"""Training in several processes, started here or by torchrun.

In: a training that wants processes. Does: starts them, or calls those of torchrun; sums gradients, norms and ranges.
Out: the trained module, as one process would have trained it.
"""
