"""The endpoint's format: request bodies to images, outcomes to JSON.

It knows the formats and no server. A server passes the decoded parameters of a request, and sends the returned status
and body.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import Refusal, RequestError

if TYPE_CHECKING:  # it imports torch, which a process that only parses need not load
    from .predictor import Outcome

#: Names of the parameter with an image or a JSON document, in order of preference.
BODY_NAMES = ("data", "body")

#: Fields of a JSON instance that may hold an image in base64.
ENCODED_NAMES = ("b64", "data")

#: Most values of a JSON document, names and lists included: seven images of 224 x 224 x 3 pixels. CPython parses so
#: many in 0.1 to 0.5 s. It holds its lock meanwhile, and allocates up to 75 MB.
MOST_VALUES = 1 << 20
_COUNTED_AT_ONCE = 1 << 20
_BLANKS = b" \t\n\r\v\f"


@dataclass(frozen=True)
class Request:
    """One request: its images in order, the number of classes for each, and the form of the answer.

    ``images`` has a refusal in place of an instance without an image. ``listed`` is true for a request with
    ``instances``, which is answered with ``predictions``. A single image is answered with its classes.
    """

    images: tuple[bytes | Refusal, ...]
    k: int
    listed: bool


def parse(
    parameters: Mapping[str, Any], *, says_json: bool, request_type: str, default_k: int, instance_limit: int
) -> Request:
    """Parse one request.

    Args:
        parameters: query parameters, multipart fields and the body, by name. Values are bytes, text, or JSON that the
            server has decoded already.
        says_json: whether the body was sent as ``application/json``.
        request_type: the request's content type in lower case. Empty if there was none.
        default_k: number of classes in an answer if the request does not say.
        instance_limit: most images in one request.

    Raises:
        RequestError: ``k``, the JSON document or the number of instances is wrong, or there is no body.
    """
    k = parse_k(parameters["k"]) if "k" in parameters else default_k
    if all(name in parameters for name in BODY_NAMES):
        raise two_images()
    body = next((parameters[name] for name in BODY_NAMES if name in parameters), None)
    if body is None:
        others = sorted(set(parameters) - {"k"})
        found = f" (found: {', '.join(others)[:80]})" if others else ""
        if not request_type or request_type.startswith("application/x-www-form-urlencoded"):
            came = f"as {request_type[:60]}" if request_type else "without a content type"
            raise RequestError(
                f"the server read the body as a web form and found no image, because it was sent {came}: send the "
                "header 'Content-Type: image/jpeg', or use curl's -T FILE instead of --data-binary"
            )
        raise RequestError(f"the request has no image: send it as the body or as the multipart field 'data'{found}")
    if isinstance(body, str):  # TorchServe decodes text/* bodies, and JSON, which may be a single text
        try:
            body = body.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise RequestError(f"the body is text with an unpaired surrogate at character {error.start}") from None
    if isinstance(body, bytes | bytearray):
        if not says_json and not looks_like_json(body):
            return Request((bytes(body),), k, listed=False)
        body = read_json(bytes(body))
    return Request(_instances(body, instance_limit), k, listed=True)


def two_images() -> RequestError:
    """Return the error for a form with several parts that may be the image."""
    return RequestError(
        "the form has more than one part 'data' or 'body': send one request for each image, or all images as JSON: "
        '{"instances": [{"b64": "<base64 of an image>"}, …]}'
    )


def looks_like_json(body: bytes | bytearray) -> bool:
    """Whether a body is JSON, whatever its content type says. No supported image format begins with a brace."""
    return bytes(body[:64]).lstrip().startswith(b"{")


def read_json(body: bytes) -> object:
    """Parse a JSON body.

    Raises:
        RequestError: the body is not valid JSON, or has more than `MOST_VALUES` values.
    """
    values = 0
    for start in range(0, len(body), _COUNTED_AT_ONCE):
        values += sum(body.count(mark, start, start + _COUNTED_AT_ONCE) for mark in (b",", b":", b"[", b"{"))
        if values > MOST_VALUES:
            raise RequestError(f"the JSON body has more than {MOST_VALUES} values: send images encoded, or binary", 413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:100]}") from None


def read_base64(text: str) -> bytes:
    """Decode base64. White space is allowed, because command lines may wrap it; other characters are not.

    Raises:
        ValueError: the text is not valid base64.
    """
    return base64.b64decode(text.encode().translate(None, _BLANKS), validate=True)


def parse_k(value: object) -> int:
    """Parse the number of classes.

    Raises:
        RequestError: the value is not a whole number from 1, or has more than nine digits.
    """
    text = bytes(value).decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise RequestError(f"k must be a whole number from 1 to 999999999, got {text[:40]!r}")
    return int(text)


def answer(request: Request, outcomes: Sequence[Outcome]) -> tuple[int, bytes]:
    """Return HTTP status and JSON body for a request whose images had these outcomes, in order.

    One image: the list of its classes, best first, or ``{"error": …}`` with the refusal's own status. Instances:
    ``{"predictions": [list or {"error": …}, …]}`` with status 200. If every instance was refused, the status is that of
    the first refusal. The body is always valid JSON (RFC 8259), in ASCII.

    Raises:
        ValueError: a probability is not a finite number.
    """
    bodies = [_body(outcome) for outcome in outcomes]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if not request.listed:
        return (refusals[0].status if refusals else 200), bodies[0].encode("ascii")
    status, opening = 200, "{"
    if len(refusals) == len(outcomes):
        status, opening = refusals[0].status, f"{_body(refusals[0])[:-1]}, "
    return status, f'{opening}"predictions": [{", ".join(bodies)}]}}'.encode("ascii")


def refuse(refusal: Refusal) -> tuple[int, bytes]:
    """Return HTTP status and JSON body for a refusal."""
    return refusal.status, _body(refusal).encode("ascii")


def _instances(document: object, limit: int) -> tuple[bytes | Refusal, ...]:
    """Return the images of ``{"instances": [{"b64": …}, …]}``; see `_image`."""
    shape = 'the JSON body must be {"instances": [{"b64": "<base64 of an image>"}, …]}'
    instances = document.get("instances") if isinstance(document, Mapping) else None
    if not isinstance(instances, list):
        raise RequestError(shape)
    if not instances:
        raise RequestError(f"the list of instances is empty: {shape}")
    if len(instances) > limit:
        raise RequestError(f"{len(instances)} instances in one request; the limit is {limit}")
    return tuple(_image(instance, index) for index, instance in enumerate(instances))


def _image(instance: object, index: int) -> bytes | Refusal:
    """Return the bytes of one instance, or the refusal for it.

    Base64 may be in ``b64``, or in ``data`` as in TorchServe's own examples for KServe. A browser's ``data:`` URL is
    accepted for the base64 in it.
    """
    fields = instance if isinstance(instance, Mapping) else {}
    found = [name for name in ENCODED_NAMES if isinstance(fields.get(name), str)]
    if len(found) != 1:
        what = "has both 'b64' and 'data'" if found else "has no text field 'b64'"
        return Refusal(400, f'instance {index} {what}: write {{"b64": "<base64 of an image>"}}')
    encoded: str = fields[found[0]]
    if encoded.startswith("data:"):
        url, comma, encoded = encoded.partition(",")
        if not comma or not url.endswith(";base64"):
            return Refusal(400, f"instance {index}: its data: URL is not in base64")
    try:
        return read_base64(encoded)
    except (binascii.Error, ValueError) as error:
        return Refusal(400, f"instance {index}: {found[0]!r} is not valid base64 ({error})")


def _body(outcome: Outcome) -> str:
    if isinstance(outcome, Refusal):
        # A quoted part may have unpaired surrogates. In JSON they would not be Unicode text (RFC 8259, 8.2).
        return json.dumps({"error": outcome.message.encode("utf-8", "replace").decode()})
    return f"[{', '.join(_label_json(label.label, label.index) + _number(label.probability) for label in outcome)}]"


@functools.lru_cache(maxsize=1 << 16)
def _label_json(label: str, index: int) -> str:
    """Return the JSON of a class up to its probability. It is the same in all answers, so it is cached."""
    return f'{{"label": {json.dumps(label)}, "index": {index}, "probability": '


def _number(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"a probability must be a finite number, got {value}")
    return f"{value!r}}}"
