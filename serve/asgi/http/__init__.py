"""HTTP requests and responses of the own server, for every protocol that runs over them.

Input: the bytes of a connection. Work: limit the cost of a client, find route, token and model, call the model's
service.
Output: a response, or a refusal of one line. Observers get a record of each request.
"""
