"""What is known of an artifact because it was measured: accuracy, latency, footprint, parity."""
