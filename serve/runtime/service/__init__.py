"""An opened artifact that many threads may ask.

In: request bodies. Does: decodes beside the engine, forms batches while it runs, takes the first execution that works.
Out: classes for each image, an answer of JSON, and where the time went.
"""
