"""Checks layer by layer whether engines compute what an INT8 artifact's integers mean.

In: the reference program, the graph or packed program, images. Does: runs each layer alone on the reference's integers.
Out: a record for each layer, and for the first that diverges the cause, found by experiment.
"""
