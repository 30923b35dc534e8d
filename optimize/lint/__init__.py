"""The linter of quantized ONNX graphs from any tool.

In: an ONNX file and its target (`base.TARGETS`). Does: reads it, applies `rules`, asks onnx and ONNX Runtime. Out:
findings with node and remedy, the reasons why the graph is invalid, and what was not judged.
"""
