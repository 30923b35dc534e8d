"""From encoded image bytes to a network's input.

Input: bytes from anybody, the card's preprocessing, a budget. Work: limit headers and structure, decode, resize, crop,
normalise. Output: a tensor ``(3, H, W)``, or an `ImageError`.
"""
