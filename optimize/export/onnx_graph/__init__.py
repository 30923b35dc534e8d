"""Programs as ONNX graphs, and what is rewritten on the way because the exporter or an engine gets it wrong.

In: a float or quantized module and an example. Does: exports, rewrites, checks. Out: an ONNX file.
"""
