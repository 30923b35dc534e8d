"""The table of docs/cifar.md: each row one recipe, against a float network that was trained for as many epochs.

In: CIFAR-10 as a folder of images, a checkpoint of ResNet-20. Does: makes each cell and its control through the store,
seed after seed, and keeps what came out. Out: ``benchmarks/records/cifar.json``, and from it ``docs/cifar.md``.
"""
