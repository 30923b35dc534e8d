"""TorchServe 0.12: its archives, its handler (which travels), its configuration, one server of it per store.

In: artifact folders and serving options. Does: packs, starts, watches, stops. Out: ``.mar`` files, an endpoint.
"""
