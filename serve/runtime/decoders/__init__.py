"""Alternatives to the runtime's own `image_preprocessing.decode`, one file for each decoder.

Input: checked headers and encoded bytes. Output: ``uint8`` images, on a GPU or the host. If a decoder does not accept
an image, the runtime decodes it itself.
"""
