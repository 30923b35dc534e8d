"""What runs a served artifact on more than one host: manifests and model repositories for engines that exist.

In: a run's artifact and how it is to be run. Does: packs it for there and writes files, one module for each target,
found by being here. Out: a folder, for whoever applies it. Nothing is sent anywhere.
"""
