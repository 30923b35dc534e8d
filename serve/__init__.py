"""Serving: the runtime inside every archive, the archives, the own server, and the TorchServe around them."""
