"""The training loop for the baseline and for quantization-aware training.

Input: a module, data, settings. Does: trains, and chooses the best epoch on held-out images. Output: the trained
module, in place, and the history of its epochs.
"""
