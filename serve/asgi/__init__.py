"""Our own server on the same runtime as TorchServe's handler: ASGI, on uvicorn, for containers and systemd.

In come requests and archives; each model has one `Service` of the runtime; out go answers, or refusals at once.
`http/` is what every protocol builds on, `protocols/` what clients speak, `process/` what starts and keeps it.
"""
