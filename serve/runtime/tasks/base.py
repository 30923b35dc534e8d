"""The interface of tasks: what a network is for, and how its outputs become answers. Also their registry.

A task is one file of this package. The registry finds it there or through an entry point. An archive packs the file of
its card's task. Servers, protocols, known answers and the load generator know only this interface.

Processes that only send requests import a task too, so its file does not import torch when it is loaded: use the
methods of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import CardError, Refusal, UserError
from ..registry import Registry, defined_at

if TYPE_CHECKING:
    from ..card.card import Card
    from ..card.known_answer import KnownAnswer
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

#: The outcome of one image: an answer, which only its task understands, or a refusal.
Outcome = Any | Refusal


def text_of(value: object) -> str:
    """Return the value of a request's parameter as text. Bytes are read as UTF-8."""
    return bytes(value).decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


@dataclass(frozen=True)
class TensorType:
    """One output tensor of the Open Inference Protocol.

    Attributes:
        datatype: ``BYTES`` (texts), ``INT64``, ``FP32`` or ``UINT8``.
        shape: sizes behind the first, which is the number of images. -1: any size.
    """

    datatype: str
    shape: tuple[int, ...]


class Task(ABC):
    """What an artifact's network is for. Open it with `open_task`. Threads share it, so nothing in it changes.

    A *parameter* is a value of a request beside its image, for example in the query. The *options* of a request are its
    parsed parameters. An *answer* is the result for one image. Options and answers may be of any type.

    Attributes:
        name: the word in the card.
        parameters: names of the parameters that it reads.
        headers: names of HTTP headers, in lower case, and the parameter that each carries.
        complete: parameters of a request for a whole answer, which can be compared with others.
        readable: parameters of a request whose answer `lines` and `fault` can read, whatever the archive's defaults.
        ended: names of the tensors that `ending` returns. Empty: answers are made of the outputs as they are.
        card: the artifact's card.
        reading: for clients that get the network's outputs themselves: what these are, and how to read them.
        tensors: the outputs in the Open Inference Protocol, by name.

    Args:
        card: the artifact's card.

    Raises:
        CardError: the task cannot be done as the card says.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()
    headers: ClassVar[Mapping[str, str]] = {}
    complete: ClassVar[Mapping[str, str]] = {}
    readable: ClassVar[Mapping[str, str]] = {}
    ended: ClassVar[tuple[str, ...]] = ()

    def __init__(self, card: Card) -> None:
        self.card = card
        self.reading = f"the outputs {', '.join(card.outputs)}"
        self.tensors: Mapping[str, TensorType] = {}

    def described(self) -> dict[str, Any]:
        """Return facts for the ``describe`` endpoint, as JSON values."""
        return {}

    # Requests.

    @classmethod
    def from_headers(cls, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters in a request's headers, whose names are in lower case."""
        return {name: headers[header] for header, name in cls.headers.items() if header in headers}

    @classmethod
    def to_headers(cls, parameters: Mapping[str, object]) -> dict[str, str]:
        """Return the headers that carry some parameters.

        Raises:
            UserError: no header of this task carries one of them.
        """
        carrying = {name: header for header, name in cls.headers.items()}
        for name in parameters:
            if name not in carrying:
                known = ", ".join(carrying) or "none"
                raise UserError(f"{cls.name} has no parameter {name!r} in a header; it has {known}")
        return {carrying[name]: str(value) for name, value in parameters.items()}

    @abstractmethod
    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> Any:
        """Parse a request's parameters.

        Args:
            parameters: all of the request's parameters by name, also those of others. Values are texts, bytes, or JSON.
            serving: the serving settings, for defaults. None: the task's own defaults.

        Raises:
            RequestError: a value is wrong.
        """

    @abstractmethod
    def size(self, options: Any) -> int:
        """Return about how many values an answer has. A thread writes long answers."""

    def widely(self, serving: Serving) -> bool:
        """Return whether answers may need `wide_ending`, so that the network's own outputs are read."""
        return False

    def answer_bytes(self, serving: Serving) -> int:
        """Return the bytes of an answer that waits for the others of its request.

        They count in the budget, like pixels that are not decoded yet. 0: so few that they need not be counted.
        """
        return 0

    # Answers.

    @staticmethod
    def ending(outputs: Outputs) -> Outputs:
        """Return the tensors that `answers` reads, batch first, from the network's outputs, wherever these lie.

        An ONNX graph has these operators behind the network, so that its engine computes them and large outputs need
        not leave it. For other files the runtime calls this function. It is traced, so it only computes with tensors.
        """
        return outputs

    @classmethod
    def wide_ending(cls, outputs: Outputs) -> Outputs:
        """Return what `ending` does, and further tensors for `answers`. No file has this ending."""
        return cls.ending(outputs)

    @abstractmethod
    def answers(self, outputs: Outputs, options: Sequence[Any], placements: Sequence[Placement]) -> list[Outcome]:
        """Return an outcome for each image of a batch.

        Args:
            outputs: what `ending` or `wide_ending` returns, on the host, floats as ``float32``.
            options: the options for each image.
            placements: how each picture lies on the network's input.
        """

    @abstractmethod
    def json(self, answer: Any) -> str:
        """Return an answer as JSON (RFC 8259) in ASCII.

        Raises:
            ValueError: a number is not finite.
        """

    def body(self, answer: Any) -> tuple[bytes, str]:
        """Return the response to a request of one image, and its media type. By default it is the JSON."""
        return self.json(answer).encode("ascii"), "application/json"

    @classmethod
    @abstractmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return an answer, from its parsed JSON, as lines for a terminal."""

    def widened(self, options: Any, names: Sequence[str]) -> Any:
        """Return the options with which an answer has enough for the named `tensors`."""
        return options

    @abstractmethod
    def tensor(self, name: str, answers: Sequence[Any], options: Any) -> tuple[tuple[int, ...], Any]:
        """Return one of the `tensors` for the answers of a request.

        Args:
            name: name of the tensor.
            answers: an answer for each image, at least one.
            options: the request's own options, which `widened` may have changed for the answers.

        Returns:
            Its shape behind the number of images, and all its values in row-major order: a list, or an array for many.

        Raises:
            RequestError: one tensor cannot hold these answers.
        """

    def body_bytes(self, answer: Any) -> int:
        """Return about how many bytes writing an answer takes. 0: so few that they need not be counted."""
        return 0

    def tensor_size(self, name: str, answers: Sequence[Any]) -> int:
        """Return about how many values a `tensor` of these answers has. 0: so few that they need not be counted."""
        return 0

    # Known answers. Answers are compared in their JSON form, as a client sees them.

    @abstractmethod
    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the facts for ``known.json``, as JSON values, from the outputs for one image and its placement."""

    def check_known(self, known: KnownAnswer) -> None:
        """Check a ``known.json``.

        Raises:
            CardError: it is not that of this artifact.
        """
        if known.task != self.name:
            raise CardError(f"the known answer is one of {known.task}, and the artifact's task is {self.name}")

    @classmethod
    def check_answer(cls, known: KnownAnswer, answer: Any) -> str:
        """Compare a complete answer with the known one. Return a line with the difference.

        Args:
            known: from a file.
            answer: the answer's parsed JSON.

        Raises:
            CardError: the answer differs too much, or the facts are wrong.
        """
        fault, within = cls.compared(known.facts, answer)
        if fault:
            raise CardError(
                f"the answer to its known image differs from the one measured with {known.execution}: {fault}"
            )
        return f"the answer to the known image matches the one of {known.execution}: {within}"

    @classmethod
    @abstractmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Return how a complete answer differs too much from a known one, and how much it differs at all.

        The first is empty if it does not differ too much. For the arguments see `known` and `check_answer`.

        Raises:
            CardError: the facts are wrong.
        """

    @classmethod
    @abstractmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Return how an answer under load differs from a reference. Empty: it does not.

        Args:
            reference: the parsed JSON of a complete answer to the same image.
            answer: the answer's parsed JSON, which may be anything.
            tolerance: how far a value may be from the reference.

        Raises:
            LookupError, TypeError, ValueError: the answer has another form.
        """


_T = TypeVar("_T", bound=Task)
_REGISTRY: Registry[type[Task]] = Registry("task", package=__package__, group="serve.tasks")


def register(entry: type[_T]) -> type[_T]:
    """Add a task to the registry. Use it as a decorator of the class.

    Raises:
        ValueError: the name is taken.
    """
    _REGISTRY.register(entry, defined_at(entry))
    return entry


def tasks() -> dict[str, type[Task]]:
    """Return all tasks by name."""
    return _REGISTRY.all()


def find_task(name: str) -> type[Task]:
    """Return the task called ``name``.

    Raises:
        UserError: there is none. The message names the closest and lists all.
    """
    return _REGISTRY.find(name)


def open_task(card: Card) -> Task:
    """Return the task of an artifact.

    Raises:
        UserError: there is no such task.
        CardError: the task cannot be done as the card says.
    """
    return find_task(card.task)(card)
