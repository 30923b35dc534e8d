"""The devices of the runtime: cores, a CPU's integers, a GPU's memory, turns, graphs and faults.

Input: tensors and exceptions. Work: copy batches to the device, in sizes that it is prepared for. Output: logits on the
host, and the machine's abilities.
"""
