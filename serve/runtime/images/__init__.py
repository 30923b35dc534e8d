"""From encoded bytes to a network's input.

In: bytes that anybody sent, the card's preprocessing, a budget. Does: bounds headers and structure, decodes, resizes,
crops, normalises. Out: a tensor ``(3, H, W)``, or an `ImageError`.
"""
