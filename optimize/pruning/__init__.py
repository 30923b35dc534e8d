"""What the pruning passes share.

In: a float module. Does: finds which channels belong together, scores them, removes or masks them. Out: a smaller
network with the structure that rebuilds it, or one of the same shape with zeros.
"""
