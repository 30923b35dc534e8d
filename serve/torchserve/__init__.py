"""TorchServe 0.12: archives, the handler inside them, configuration, and one server for each store.

Input: artifact folders and serving options. Work: pack, start, watch, stop. Output: ``.mar`` files, and an endpoint.
"""
