"""Writes programs as ONNX graphs, and rewrites what the exporter or an engine gets wrong.

In: a float or quantized module and an example. Does: exports, rewrites, checks. Out: an ONNX file.
"""
