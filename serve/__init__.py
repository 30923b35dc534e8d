"""Serving: the runtime inside every archive, the archives, and the TorchServe around them."""
