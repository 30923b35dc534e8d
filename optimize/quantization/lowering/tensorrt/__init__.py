"""What is written otherwise because TensorRT does not take it between quantizers, one file an operator."""
