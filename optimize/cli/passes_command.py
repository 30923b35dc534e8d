"""The command ``passes``."""

from __future__ import annotations

from rich.console import Console

from serve.common.command_line import reported


def list_passes() -> None:
    """List the passes, what they take, and their settings."""
    with reported():
        from optimize.passes.base import passes
        from optimize.store.artifact import KIND_NAMES
        from serve.common.config import defaults

        console = Console()
        for step in passes().values():
            accepts = " or ".join(KIND_NAMES[kind] for kind in sorted(step.accepts))
            console.print(f"[bold]{step.name}[/bold]: {step.summary}; takes {accepts}, gives {KIND_NAMES[step.yields]}")
            usual = defaults(step.config)
            for field_name, entry in step.config.model_fields.items():
                console.print(f"    {field_name} = {usual[field_name]!r}: {entry.description}", highlight=False)
