"""The table of docs/benchmarks/cifar.md: each row a recipe, against a float network trained for as many epochs.

In: CIFAR-10 as a folder of images, a checkpoint of ResNet-20. Does: makes each cell and its control through the store,
seed after seed, and keeps what came out. Out: ``benchmarks/records/cifar.json``, and from it
``docs/benchmarks/cifar.md``.
"""
