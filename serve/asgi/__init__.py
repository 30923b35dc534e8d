"""The own server, on the same runtime as TorchServe's handler: ASGI on uvicorn, for containers and systemd.

Input: requests and archives. Each model has one `Service` of the runtime. Output: responses, or immediate refusals.
`http/` is the base of every protocol, `protocols/` has the protocols, and `process/` starts and watches the server.
"""
