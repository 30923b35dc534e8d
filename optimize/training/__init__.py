"""The one training loop, for the baseline and for quantization-aware training.

In: a module, data, settings. Does: SGD with the best epoch chosen on held-out images.
Out: the trained module, in place, and what each epoch was.
"""
