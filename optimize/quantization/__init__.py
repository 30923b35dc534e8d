"""What the quantizing passes share.

In: a float module. Does: inserts observers, converts with torch.ao, lowers to explicit Q/DQ, checks the result. Out:
packed int8 programs and int8 ONNX graphs.
"""
