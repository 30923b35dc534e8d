"""The tensors that stay in float, and why. One file for each reason.

In: a traced float network. Does: finds operators that integers would harm, or that gain nothing from them. Out: names
of nodes that get no observer, or calls in modules that torch.ao does not quantize.
"""
