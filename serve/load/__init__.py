"""A load generator: HTTP/1.1 over persistent connections, in its own process, cheap enough to share the cores.

Input: a workload (requests with known answers) and a plan (clients or a rate, seconds). Work: send requests, time and
check every answer. Output: counts by verdict, latencies, the server's stages, and the generator's own CPU time.
"""
