"""How ``hf-paged doctor`` looks, as tables or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_paged.doctor import Report


def as_json(report: Report) -> None:
    """One object, for scripts."""
    data = dataclasses.asdict(report)
    data["usable"] = report.usable
    data["extras"] = {extra.name: {"missing": list(extra.missing), "how": extra.how} for extra in report.extras}
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def as_tables(report: Report) -> None:
    """For a person."""
    console = Console(highlight=False)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, version in report.versions.items():
        facts.add_row(name, escape(version))
    for device in report.devices:
        facts.add_row(device.kind, escape(f"{device.name} ({device.features})"))
    facts.add_row("threads", str(report.threads))
    facts.add_row(
        "C++ compiler", escape(report.compiler or "none: the native kernel cannot be built (apt install g++)")
    )
    facts.add_row("CPU kernel", report.cpu_kernel or "none")
    console.print(facts)

    console.print("\n[bold]Attention backends, best first[/]")
    backends = Table()
    for column in ("backend", "", "why"):
        backends.add_column(column, overflow="fold")
    for line in report.backends:
        state = "[bold green]chosen[/]" if line.chosen else "ready" if line.available else "[yellow]not available[/]"
        backends.add_row(line.name, state, escape(line.reason))
    console.print(backends)

    has_gpu = any(device.kind == "cuda" for device in report.devices)
    console.print("\n[bold]Optional parts[/]")
    extras = Table()
    for column in ("part", "for", "", "how to get it"):
        extras.add_column(column, overflow="fold")
    for extra in report.extras:
        if not extra.missing:
            extras.add_row(extra.name, extra.purpose, "[green]installed[/]", "")
        elif extra.needs_gpu and not has_gpu:
            extras.add_row(extra.name, extra.purpose, "no GPU here", escape(extra.how))
        else:
            extras.add_row(extra.name, extra.purpose, "[yellow]missing[/]", escape(extra.how))
    console.print(extras)

    for problem in report.problems:
        console.print(f"[bold red]problem[/] {escape(problem)}")
    console.print("[green]hf_paged can be used here.[/]" if report.usable else "[red]hf_paged cannot be used here.[/]")
