"""Writes modules as files that open without their Python code.

In: a float or quantized module and an example. Does: exports, writes, checks, counts. Out: exported programs,
TorchScript, ONNX graphs.
"""
