"""A progress bar with the time left, in a terminal or a notebook. In a script or a log it shows nothing."""

from __future__ import annotations

import contextlib
import html
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

#: Seconds. Shorter steps show no bar.
SHOWN_AFTER_S = 2.0
_EVERY_S = 0.1  # seconds between two updates
_TICK_S = 1.0  # seconds between two updates of a step without known progress


class Surface(Protocol):
    """A place to draw a bar. One thread at a time calls it."""

    def draw(self, name: str, fraction: float, text: str) -> None:
        """Draw or update the bar. ``fraction`` is in [0, 1]."""

    def clear(self) -> None:
        """Remove the bar, if there is one."""

    def say(self, line: str) -> None:
        """Write a line that stays. No bar is on the screen then."""


class TerminalSurface:
    """A bar on the last line of a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def draw(self, name: str, fraction: float, text: str) -> None:
        """See `Surface`."""
        if self._bar is None:
            columns = (TextColumn("  {task.fields[name]:<16}"), BarColumn(40), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=1.0, name=name, text=text)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=fraction, name=name, text=text)

    def clear(self) -> None:
        """See `Surface`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """See `Surface`."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class NotebookSurface:
    """A bar below a notebook's cell. Rich's own needs ipywidgets, which many notebooks lack."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, name: str, fraction: float, text: str) -> None:
        """See `Surface`."""
        self._show(
            f'<div>{html.escape(name)} <progress value="{fraction:.4f}" max="1"></progress> {html.escape(text)}</div>'
        )

    def clear(self) -> None:
        """See `Surface`."""
        if self._handle is not None:
            self._show("")
            self._handle = None

    def say(self, line: str) -> None:
        """See `Surface`."""
        notebook: Any = importlib.import_module("IPython.display")
        notebook.display(notebook.Pretty(line))

    def _show(self, text: str) -> None:
        notebook: Any = importlib.import_module("IPython.display")  # every notebook has it
        if self._handle is None:
            self._handle = notebook.display(notebook.HTML(text), display_id=True)
        else:
            self._handle.update(notebook.HTML(text))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:  # a kernel has imported it already; an import here would take time
        return False
    from IPython import get_ipython

    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_ipython()).__mro__)  # Colab has a subclass


def surface(console: Console | None = None) -> Surface | None:
    """Return the place for a bar here. None in a script or a log."""
    if in_notebook():
        return NotebookSurface()
    console = console or Console(stderr=True)
    return TerminalSurface(console) if console.is_terminal else None


class ProgressBar:
    """Shows the progress of a long step, the time left, and lines that stay.

    It is also a listener of `optimize`'s runs. In a script or a log it shows nothing, because the output belongs to the
    program. Thread-safe. Pickling gives a new bar, because a bar belongs to its process.

    Args:
        drawn_on: see `surface`. None: nothing is ever shown.
        after_s: seconds before a step shows its bar. None: `SHOWN_AFTER_S`.
    """

    def __init__(self, drawn_on: Surface | None, after_s: float | None = None) -> None:
        self._surface = drawn_on
        self._after_s = SHOWN_AFTER_S if after_s is None else after_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._name = ""
        self._message = ""
        self._fraction = 0.0
        self._begun = self._faults_of = self._drawn = 0.0

    def __reduce__(self) -> tuple[Callable[[], ProgressBar], tuple[()]]:
        return (here, ())

    def started(self, name: str) -> None:
        """Start a step."""
        self._end()
        with self._lock:
            self._name, self._message, self._fraction = name, "", 0.0
            self._begun = self._faults_of = time.monotonic()
            if self._surface is not None:
                # By a timer, because some steps never report progress, for example an export.
                self._wake(self._after_s)

    def progressed(self, fraction: float, message: str) -> None:
        """Update the progress of the step."""
        now = time.monotonic()
        with self._lock:
            self._fraction, self._message, self._faults_of = fraction, message, now
        if now - self._begun >= self._after_s and now - self._drawn >= _EVERY_S:
            self._draw()

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """End the step."""
        self._end()

    def said(self, message: str) -> None:
        """Write a line that stays above the bar."""
        with self._lock:
            if self._surface is not None:
                self._surface.clear()
                self._surface.say(message)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the bar during lines of output. It returns with the next progress."""
        with self._lock:
            if self._surface is not None:
                self._surface.clear()
            yield

    def close(self) -> None:
        """Remove the bar, even if a step is not finished."""
        self._end()

    def _wake(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tick)
        self._timer.daemon = True
        self._timer.start()

    def _tick(self) -> None:
        self._draw()
        with self._lock:
            if self._timer is threading.current_thread():  # else the timer belongs to an earlier step
                self._wake(_TICK_S)

    def _draw(self) -> None:
        with self._lock:
            if self._surface is None or self._timer is None:
                return  # the step has ended meanwhile
            self._drawn = time.monotonic()
            text = " · ".join(part for part in (self._message, self._time(self._drawn)) if part)
            self._surface.draw(self._name, min(self._fraction, 1.0), text)

    def _time(self, now: float) -> str:
        left = -1.0
        if 0.02 <= self._fraction < 1:  # time for the rest at the same pace, minus the time since the last report
            left = (self._faults_of - self._begun) * (1 - self._fraction) / self._fraction - (now - self._faults_of)
        return f"{duration(left)} left" if left >= 0 else f"{duration(now - self._begun)} so far"

    def _end(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._surface is not None:
                self._surface.clear()


def here() -> ProgressBar:
    """Return a bar for this process's notebook or terminal."""
    return ProgressBar(surface())


@contextlib.contextmanager
def shown(name: str) -> Iterator[ProgressBar]:
    """Show a bar in this process's notebook or terminal for one step. It is always removed at the end."""
    bar = here()
    bar.started(name)
    try:
        yield bar
    finally:
        bar.close()


def duration(seconds: float) -> str:
    """Return seconds as ``12 s`` or ``3:05 min``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02d} min"
