"""Reads images and labels: from a reference to batches of pixels.

Input: a reference such as ``imagefolder:photos``. Does: finds, splits and fingerprints the images, and decodes them
with the serving runtime. Output: ``uint8`` batches and labels.
"""
