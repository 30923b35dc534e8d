"""Images and labels, from a reference to batches of pixels.

In: a reference such as ``imagefolder:photos``. Does: finds, splits, fingerprints, decodes with the serving runtime.
Out: ``uint8`` batches and labels.
"""
