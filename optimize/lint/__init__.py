"""The linter of quantized ONNX graphs, whatever tool made them.

In: an ONNX file and what it is for (`base.TARGETS`). Does: asks each rule of `rules`. Out: findings, each with its node
and remedy.
"""
