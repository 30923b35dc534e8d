"""What the quantizing passes share.

In: a float module. Does: observes, converts with torch.ao, lowers to explicit Q/DQ, proves the result.
Out: packed int8 programs and int8 ONNX graphs.
"""
