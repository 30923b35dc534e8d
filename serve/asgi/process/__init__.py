"""Our own server as a process, or several: it starts, loads models, changes them, watches itself, drains and ends.

In: settings, and what is to be served. Does: opens and warms models, obeys signals, tells systemd and Prometheus.
Out: a server that listens, and an exit code.
"""
