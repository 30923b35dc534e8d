"""What all tests share: hypothesis judges what it finds, and not how busy the machine is; Ctrl-C reaches programs."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell's `… &` has its jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
