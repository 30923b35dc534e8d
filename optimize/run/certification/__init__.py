"""The parity certificates of INT8 artifacts: in a run, and on demand."""
