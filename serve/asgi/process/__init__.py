"""The own server as one process or several: start, loading and updates of models, watchdog, draining and shutdown.

Input: settings, and the models to serve. Work: open and warm models, handle signals, notify systemd and Prometheus.
Output: a listening server, and an exit code.
"""
