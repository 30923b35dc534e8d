"""The own server's protocols: TorchServe's paths, KServe's version 1, the Open Inference Protocol by REST and gRPC.

Input: a `Call`, or a gRPC message. Work: parse it as a request of the runtime. Output: results in that protocol's
format.
"""
