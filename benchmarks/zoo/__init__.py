"""Every classifier of torchvision, and one of each of timm's families, through the passes: ``make zoo``.

In: names. Does: a process a model, under a cap of memory and time; weights that answer, fuse, ptq, onnx and onnx-int8
for both targets, agreement of what runs with what is meant, speed. Out: a record for each
model, all of them in one file, a page.
"""
