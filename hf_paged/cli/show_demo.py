"""How ``hf-paged demo`` looks: a progress bar while it runs, then a table for each thing shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

import hf_paged
from hf_paged import demo
from hf_paged.demo import Comparison, Generated, Settings, Subject, Turn

_T = TypeVar("_T")


def run(settings: Settings) -> bool:
    """Run and show everything; True when all paged results were stock's."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    console = Console(width=None if Console().is_terminal else 100, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.fields[stage]}"), BarColumn(20), TextColumn("{task.description}"))
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("", total=6, stage="loading")

            def step(text: str) -> None:
                progress.update(task, description=escape(_short(text, 48)))

            def stage(name: str, function: Callable[[Subject, demo.Step], _T]) -> _T:
                progress.update(task, stage=name, advance=1)
                if not console.is_terminal:  # the bar cannot be seen in a log
                    console.print(f"{name} ...")
                return function(subject, step)

            if not console.is_terminal:
                console.print("Each call runs twice, stock and paged; a minute or two on two idle cores.")
            subject = demo.prepare(settings, step)
            answers = stage("answers", demo.compare_answers)
            openings = stage("texts", demo.compare_openings)
            turns = stage("chat", demo.compare_chat)
            ragged = stage("batch", demo.compare_ragged)
            beams = stage("beams", demo.compare_beams)
        console.print(f"[bold]{escape(settings.model)}[/], {settings.dtype}: {escape(_layers(subject))}\n")
    finally:
        hf_paged.unregister()

    _show_answers(console, answers)
    _show_chat(console, turns)
    everything = [*answers, *openings, *(turn.comparison for turn in turns), ragged, beams]
    _show_verdicts(
        console,
        [
            ("chat questions", answers),
            ("texts", openings),
            ("chat turns, reusing", [turn.comparison for turn in turns]),
        ],
        [ragged, beams],
    )
    _show_memory(console, [ragged, beams])
    _show_times(console, answers + openings, turns, ragged, beams)
    return _show_conclusion(console, everything)


def _layers(subject: Subject) -> str:
    stats = hf_paged.cache_stats(subject.model)
    parts = []
    if stats.native:
        parts.append(f"{len(stats.native)} layers attend on blocks directly")
    if stats.gathered:
        reasons = ", ".join(sorted(set(stats.gathered.values())))
        parts.append(f"{len(stats.gathered)} on gathered keys and values ({reasons})")
    return "; ".join(parts) or "no layer of this model is paged"


def _show_answers(console: Console, answers: Sequence[Comparison]) -> None:
    table = _table("Answers (paged)", "question", "answer", "tokens", "as stock")
    for one in answers:
        table.add_row(escape(one.title), escape(one.answer.strip()), str(one.tokens), _mark(one))
    console.print(table)


def _show_chat(console: Console, turns: Sequence[Turn]) -> None:
    table = _table("One chat: tokens computed before the first new one", "turn", "you", "no reuse", "reuse", "as stock")
    for number, turn in enumerate(turns, 1):
        table.add_row(
            str(number),
            escape(turn.user),
            str(turn.prompt_tokens),
            str(turn.prefilled_tokens),
            _mark(turn.comparison),
        )
    table.add_section()
    table.add_row("", "all", str(sum(t.prompt_tokens for t in turns)), str(sum(t.prefilled_tokens for t in turns)), "")
    console.print(table)


def _show_verdicts(
    console: Console, groups: Sequence[tuple[str, Sequence[Comparison]]], single: Sequence[Comparison]
) -> None:
    table = _table("Tokens against stock generate()", "what", "calls", "new tokens", "identical", "verdict")
    for name, group in [*groups, *((one.title, [one]) for one in single)]:
        same = sum(one.identical for one in group)
        worst = max(group, key=lambda one: (not one.holds, not one.identical, one.gap))
        table.add_row(
            name, str(len(group)), str(sum(one.tokens for one in group)), f"{same} of {len(group)}", _mark(worst)
        )
    console.print(table)


def _show_memory(console: Console, comparisons: Sequence[Comparison]) -> None:
    table = _table("Keys and values held at the end", "what", "DynamicCache", "paged", "paged/stock")
    for one in comparisons:
        table.add_row(one.title, _mib(one.stock.kv_bytes), _mib(one.paged.kv_bytes), _ratio(*_bytes(one)))
    console.print(table)


def _show_times(
    console: Console, single: Sequence[Comparison], turns: Sequence[Turn], ragged: Comparison, beams: Comparison
) -> None:
    table = _table("Time for one more token (prompt included), one run each", "what", "stock", "paged", "paged/stock")
    rows = [
        ("one row at a time", single),
        ("chat, reusing prefixes", [turn.comparison for turn in turns]),
        (ragged.title, [ragged]),
        (beams.title, [beams]),
    ]
    for name, group in rows:
        stock, paged = _milliseconds([one.stock for one in group]), _milliseconds([one.paged for one in group])
        table.add_row(name, f"{stock:.1f} ms", f"{paged:.1f} ms", _ratio(paged, stock))
    console.print(table)


def _show_conclusion(console: Console, everything: Sequence[Comparison]) -> bool:
    wrong = [one for one in everything if not one.holds]
    tied = [one for one in everything if one.holds and not one.identical]
    if wrong:
        console.print(f"[bold red]{len(wrong)} of {len(everything)} calls differ from stock generate().[/]")
        return False
    if tied:
        console.print(
            f"[bold green]{len(everything) - len(tied)} of {len(everything)} calls gave stock's tokens;[/] in "
            f"{len(tied)} the model was undecided (difference at most {max(one.gap for one in tied):.3g}) and rounding "
            "chose."
        )
        return True
    console.print(f"[bold green]All {len(everything)} calls gave exactly the tokens of stock generate().[/]")
    return True


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    for number, column in enumerate(columns):
        words = number == 0 or column in ("answer", "you", "as stock", "verdict")
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _mark(one: Comparison) -> str:
    if one.identical:
        return "[green]identical[/]"
    return f"[yellow]tie ({one.gap:.2g})[/]" if one.holds else f"[bold red]differs ({one.gap:.2g})[/]"


def _milliseconds(calls: Sequence[Generated]) -> float:
    """Per step, since a tie may make one of two answers longer."""
    return 1000 * sum(call.seconds for call in calls) / max(1, sum(call.steps for call in calls))


def _bytes(one: Comparison) -> tuple[int, int]:
    return one.paged.kv_bytes, one.stock.kv_bytes


def _ratio(paged: float, stock: float) -> str:
    return f"{paged / stock:.2f}" if stock else "-"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
