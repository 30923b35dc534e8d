"""From a converted network to an ONNX graph with explicit quantizers, and what is written there for the engines.

In: a reference form of torch.ao or PT2E. Does: makes quantizers explicit, rounds biases, works around engines' faults.
Out: a program for the ONNX exporter, and what the packed program needs to give the same integers.
"""
