"""Quantization side by side: ours with each observer and recovery, and the peers, on one checkpoint and equal images.

In: a model, its checkpoint and data. Does: makes and answers a row for each way to quantize, kept as it is made; times
all of them in turns, as a step of its own. Out: records, and from them ``docs/benchmarks/quant.md`` with its plot.
"""
