"""Modules into files that open without their Python code.

In: a float or quantized module and an example. Does: traces, exports, writes, checks.
Out: TorchScript, exported programs, ONNX graphs.
"""
