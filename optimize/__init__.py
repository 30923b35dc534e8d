"""A trained vision model becomes measured artifacts: passes, quantization, honest measurement."""

import os

# Idle OpenMP threads that spin take the core from whoever works: on a busy machine an int8 ResNet-18 took
# 30 times its time. The served workers wait passively too, so what is measured is what is served. libgomp
# reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
