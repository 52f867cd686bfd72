"""How results look on a terminal: a table of figures, one of ratios and floors, and what has to be said about them."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_paged.bench.results import DISTURBED, OK, Figures, PeerResult, Results
from hf_paged.bench.workload import Case


def show(results: Results, console: Console) -> None:
    """Print everything."""
    settings, machine = results.settings, results.machine
    devices = "; ".join(f"{d['name']} ({d['features']})" for d in machine["devices"])
    console.print(
        f"[bold]{escape(results.model)}[/], {settings['dtype']}, {settings['threads']} threads, {settings['repeats']} "
        f"repeats, {escape(results.workloads)}{escape(': ' + results.note if results.note else '')}"
    )
    console.print(f"{escape(devices)}, {machine['cores']} cores, {machine['ram_gib']} GiB\n")
    console.print(_figures(results))
    if results.baseline() is not None and len(results.peers) > 1:
        console.print(_ratios(results))
    console.print(_starts(results))
    _remarks(results, console)


def _figures(results: Results) -> Table:
    table = _table("Medians (min .. max)", "peer", *(f"{c.name}\n{c.unit}" for c in results.cases))
    for peer in results.peers:
        if peer.reason:
            table.add_row(peer.name, f"[yellow]{escape(_first_line(peer.reason))}[/]")
        else:
            table.add_row(peer.name, *(_figure(peer.cases.get(case.name)) for case in results.cases))
    if results.floors:
        table.add_section()
        table.add_row("floor", *(f"{results.floors[case.name]:.3g}" for case in results.cases))
    return table


def _figure(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    if not figures.shown:
        return {OK: "-", DISTURBED: "[yellow]disturbed[/]"}.get(figures.state, "[red]failed[/]")
    low, high = figures.span
    text = f"{figures.median:.4g}" + ("[yellow]*[/]" if figures.marked else "")
    return text if len(figures.repeats) == 1 else f"{text}\n({low:.4g} .. {high:.4g})"


def _ratios(results: Results) -> Table:
    ours = results.baseline()
    assert ours is not None
    table = _table(
        f"{ours.name} is so many times as fast (share of the floor reached)",
        "peer",
        *(case.name for case in results.cases),
    )
    for peer in results.peers:
        if not peer.reason:
            table.add_row(peer.name, *(_ratio(results, case, peer) for case in results.cases))
    return table


def _ratio(results: Results, case: Case, peer: PeerResult) -> str:
    ratio, reached = results.ratio(case, peer), results.of_floor(case, peer)
    share = f"({reached:.0%})" if reached is not None else ""
    if ratio is None:
        return share or "-"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/] {share}"


def _starts(results: Results) -> Table:
    judged = [c.name for c in results.cases if c.kind == "throughput"]
    agreements = [f"{name}: as fp32 stock\n(mean prefix)" for name in judged]
    memory = ("peak RSS GiB", "beyond model and KV,\nof the weights")
    table = _table("Start-up, memory, greedy tokens", "peer", "ready s", "first token s", *memory, *agreements)
    for peer in results.peers:
        if not peer.reason:
            peak = max((r.peak_rss for f in peer.cases.values() for r in f.repeats), default=0)
            table.add_row(
                peer.name,
                _seconds(peer.start_s),
                _seconds(peer.first_token_s),
                f"{peak / 2**30:.2f}" if peak else "-",
                _beyond(peer),
                *(_agreement(peer.cases.get(name)) for name in judged),
            )
    return table


def _beyond(peer: PeerResult) -> str:
    """The most memory beside the loaded model and the blocks, where the peer tells those."""
    shares = [
        (repeat.peak_rss - found["rss_model"] - found["kv_bytes"]) / found["weight_bytes"]
        for figures in peer.cases.values()
        for repeat in figures.repeats
        if {"rss_model", "weight_bytes", "kv_bytes"} <= (found := repeat.details).keys()
    ]
    return f"{max(shares):.2f}x" if shares else "-"


def _agreement(figures: Figures | None) -> str:
    if figures is None or figures.agreement is None:
        return "-"
    found = figures.agreement
    return f"{found.identical} of {found.requests} ({found.prefix:.2f})"


def _remarks(results: Results, console: Console) -> None:
    if any(figures.marked for peer in results.peers for figures in peer.cases.values()):
        console.print("[yellow]* measured while others used the processors (--accept-load)[/]")
    cut = "interrupted: fewer repeats than asked for, or none" if results.interrupted else ""
    for note in filter(None, (cut, results.floor_note, results.agreement_note)):
        console.print(f"[yellow]{escape(note)}[/]")
    for peer in results.peers:
        if "\n" in peer.reason:
            console.print(f"[yellow]{peer.name}[/]: {escape(peer.reason)}")
        for name, figures in peer.cases.items():
            if figures.reason:
                console.print(f"[yellow]{peer.name}, {name}: {figures.state}[/]: {escape(figures.reason)}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _first_line(text: str) -> str:
    return text.splitlines()[0]
