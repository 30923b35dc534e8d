"""What the runtime computes on: cores, integers of a CPU, a GPU's memory, turns, graphs and faults.

In: tensors and exceptions. Does: brings batches to the device in sizes that it is prepared for.
Out: logits on the host; what this machine can do.
"""
