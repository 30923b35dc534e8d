"""The linter of quantized ONNX graphs, whatever tool made them.

In: an ONNX file and what it is for (`base.TARGETS`). Does: reads it, asks `rules`, onnx and ONNX Runtime. Out:
findings, each with its node and remedy; what makes the graph invalid; what was not judged.
"""
