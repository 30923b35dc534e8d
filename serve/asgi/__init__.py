"""Our own server on the same runtime as TorchServe's handler: ASGI, on uvicorn, for containers and systemd.

In come requests and archives; each model has one `serve.runtime.service.Service`; out go answers, or refusals at once.
`application` is the ASGI callable, `router` and `models` are what other protocols build on, `server` the process.
"""
