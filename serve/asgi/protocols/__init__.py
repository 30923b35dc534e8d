"""What our own server speaks: TorchServe's paths, KServe's version 1, the Open Inference Protocol by REST and gRPC.

In: a `Call`, or a gRPC message. Does: reads it as a request of the runtime. Out: outcomes as that protocol has them.
"""
