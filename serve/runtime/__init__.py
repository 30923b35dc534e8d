"""The runtime that every archive contains: from image bytes to answers, as the artifact's card says.

It imports torch, torchvision, Pillow, numpy and (for ONNX artifacts) onnxruntime. It imports nothing else of this
project and nothing of TorchServe. Measurements use it too, so they measure what is served.
"""
