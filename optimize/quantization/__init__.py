"""What the quantizing passes share: targets, observers, and the exact lowering to QDQ ONNX."""
