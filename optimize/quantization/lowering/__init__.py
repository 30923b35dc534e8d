"""Lowers a converted network to an ONNX graph with explicit quantizers, and rewrites what engines get wrong.

In: a reference form of torch.ao or PT2E. Does: makes quantizers explicit, rounds biases, works around engine faults.
Out: a program for the ONNX exporter, and the data that the packed program needs to give the same integers.
"""
