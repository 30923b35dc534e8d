"""Requests that are expensive to parse, or to hold: deep and long JSON, many instances, compressed bodies."""

from __future__ import annotations

import gzip
import json

from benchmarks.hostile import bombs
from serve.load.workload import instances_body


def nested(depth: int) -> bytes:
    """Instances that are a list in a list in a list."""
    return b'{"instances": ' + b"[" * depth + b"]" * depth + b"}"


def long_list(numbers: int) -> bytes:
    """As many instances, each of them a number."""
    return b'{"instances": [' + b"1," * (numbers - 1) + b"1]}"


def long_number(digits: int) -> bytes:
    """One instance: an integer, whose conversion from decimal takes the square of its length."""
    return b'{"instances": [' + b"9" * digits + b"]}"


def many_keys(keys: int) -> bytes:
    """An object of as many keys, none of them known."""
    return json.dumps({**{f"k{number}": 0 for number in range(keys)}, "instances": []}).encode()


def large_images_together(images: int) -> bytes:
    """Images that are each allowed alone, of 49 megapixels in a few bytes."""
    return instances_body([bombs.webp()] * images)


def compressed(megabytes: int) -> bytes:
    """Zeros as gzip has them, a thousandth of it."""
    return gzip.compress(bytes(megabytes << 20), mtime=0)
