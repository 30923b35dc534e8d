"""HTTP requests and answers of our own server, whatever protocol is spoken over them.

In: bytes of a connection. Does: bounds what a client may cost, finds route, token and model, asks the model's service.
Out: an answer, or a refusal of one line; observers are told of each.
"""
