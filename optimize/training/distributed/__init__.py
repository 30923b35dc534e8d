"""Training in several processes, started here or by torchrun.

Input: a training that needs several processes. Does: starts them, or calls those of torchrun, and sums gradients, norms
and ranges. Output: the trained module, as one process would have trained it.
"""
