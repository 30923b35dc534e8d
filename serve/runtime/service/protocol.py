"""The endpoint's format: request bodies to images, outcomes to JSON.

It knows the formats, and no server or task. A server passes the decoded parameters of a request, and sends the returned
status and body. The artifact's task parses its own parameters and writes the answer to an image.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Refusal, RequestError

if TYPE_CHECKING:  # it imports torch, which a process that only parses need not load
    from ..card.serving import Serving
    from ..tasks.base import Outcome, Task

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
    """One request: its images in order, the options that its task has parsed, and the form of the answer.

    ``images`` has a refusal in place of an instance without an image. ``listed`` is true for a request with
    ``instances``, which is answered with ``predictions``. A single image is answered with the task's answer alone.
    """

    images: tuple[bytes | Refusal, ...]
    options: Any
    listed: bool


def parse(
    parameters: Mapping[str, Any], task: Task, serving: Serving, *, says_json: bool, request_type: str
) -> Request:
    """Parse one request.

    Args:
        parameters: query parameters, multipart fields and the body, by name. Values are bytes, text, or JSON that the
            server has decoded already.
        task: the artifact's task.
        serving: the serving settings: defaults of the task's options, and the most images in one request.
        says_json: whether the body was sent as ``application/json``.
        request_type: the request's content type in lower case. Empty if there was none.

    Raises:
        RequestError: a parameter, the JSON document or the number of instances is wrong, or there is no body.
    """
    options = task.options(parameters, serving)
    if all(name in parameters for name in BODY_NAMES):
        raise two_images()
    body = next((parameters[name] for name in BODY_NAMES if name in parameters), None)
    if body is None:
        others = sorted(set(parameters).difference(task.parameters))
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
            return Request((bytes(body),), options, listed=False)
        body = read_json(bytes(body))
    return Request(_instances(body, serving.instance_limit), options, listed=True)


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


class Reply(NamedTuple):
    """HTTP status, body and media type of a response."""

    status: int
    body: bytes
    content_type: str = "application/json"


def answer(task: Task, request: Request, outcomes: Sequence[Outcome]) -> Reply:
    """Return the response to a request whose images had these outcomes, in order.

    One image: the task's answer, which need not be JSON, or ``{"error": …}`` with the refusal's own status. Instances:
    ``{"predictions": [answer or {"error": …}, …]}`` with status 200. If every instance was refused, the status is that
    of the first refusal. JSON is always valid (RFC 8259), in ASCII.

    Raises:
        ValueError: a number of an answer is not finite.
    """
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if not request.listed:
        return refuse(refusals[0]) if refusals else Reply(200, *task.body(outcomes[0]))
    bodies = [_error(outcome) if isinstance(outcome, Refusal) else task.json(outcome) for outcome in outcomes]
    status, opening = 200, "{"
    if len(refusals) == len(outcomes):
        status, opening = refusals[0].status, f"{_error(refusals[0])[:-1]}, "
    return Reply(status, f'{opening}"predictions": [{", ".join(bodies)}]}}'.encode("ascii"))


def refuse(refusal: Refusal) -> Reply:
    """Return the response to a refused request."""
    return Reply(refusal.status, _error(refusal).encode("ascii"))


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


def _error(refusal: Refusal) -> str:
    # A quoted part may have unpaired surrogates. In JSON they would not be Unicode text (RFC 8259, 8.2).
    return json.dumps({"error": refusal.message.encode("utf-8", "replace").decode()})
