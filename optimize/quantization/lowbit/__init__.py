"""Weights and activations of 1 to 7 bits, trained or calibrated, and run by int8 kernels.

In: a traced float network. Does: quantizes layers' weights and inputs on small integer grids, which may be learned.
Out: the prepared network that `write_quantized` writes, whose integers are those of the grids.
"""
