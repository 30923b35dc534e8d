"""Rewrites of operators that TensorRT does not support between quantizers. One file for each operator."""
