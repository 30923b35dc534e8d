"""Whether engines compute what an INT8 artifact's integers mean, layer by layer.

In: the reference program, the graph or packed program, images. Does: runs each layer alone on the reference's integers.
Out: a record for each layer; of the first that diverges the cause, found by experiment.
"""
