"""What travels inside every archive: from bytes to top-k, by the artifact's own card.

Imports torch, torchvision, Pillow, numpy and (for ONNX artifacts) onnxruntime; nothing of this
project outside this folder, and nothing of TorchServe. The measurements use it too, so that what
is measured is what is served.
"""
