"""The engines that run model files, one file for each. `base` has their common parts.

Input: a verified artifact folder, and an execution. Work: open it, without a silent fallback. Output: from batches to
logits.
"""
