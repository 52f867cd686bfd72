"""The figures as a picture: a panel for each case, a bar for each peer, its repeats' span, and the floor as a line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hf_paged.bench.results import Results
from hf_paged.bench.workload import Case
from hf_paged.errors import UnsupportedError

_COLUMNS = 3
_OURS, _THEIRS, _FLOOR = "#d1495b", "#8d99ae", "#2b2d42"


def check() -> None:
    """Raise UnsupportedError where nothing can be drawn: to be known before an hour of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("the chart is drawn with matplotlib: pip install 'hf-paged[bench]'")


def draw(results: Results, path: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    rows = -(-len(results.cases) // _COLUMNS)
    columns = min(_COLUMNS, len(results.cases))
    height = 0.9 + rows * (1.0 + 0.28 * len(results.peers))
    figure = Figure(figsize=(5.2 * columns, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, case in zip(panels, results.cases, strict=False):
        _panel(panel, results, case)
    for panel in panels[len(results.cases) :]:
        panel.set_axis_off()
    marked = any(figures.marked for peer in results.peers for figures in peer.cases.values())
    device = results.machine["devices"][-1]
    figure.suptitle(
        f"{results.model}, {results.settings['dtype']}, {results.settings['threads']} threads - "
        f"{device['name']} ({device['features']})"
        + ("\nhatched: measured while others used the processors" if marked else ""),
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _panel(panel: Any, results: Results, case: Case) -> None:
    ours = results.baseline()
    names = [peer.name for peer in results.peers]
    for position, peer in enumerate(results.peers):
        figures = peer.cases.get(case.name)
        if figures is None or not figures.shown:
            why = "no figures" if peer.reason else figures.state if figures and figures.reason else "-"
            panel.text(0, position, f" {why}", va="center", fontsize=8, color=_THEIRS)
            continue
        middle, (low, high) = figures.median, figures.span
        panel.barh(
            position,
            middle,
            xerr=[[middle - low], [high - middle]],
            color=_OURS if peer is ours else _THEIRS,
            hatch="//" if figures.marked else None,
            edgecolor="white",
        )
        label = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        panel.annotate(
            f"{middle:.4g}", (0, position), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=label
        )
    if case.name in results.floors:
        panel.axvline(results.floors[case.name], color=_FLOOR, linestyle="--", linewidth=1)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(left=0)
    panel.tick_params(axis="x", labelsize=8)
    better = "more" if case.higher else "less"
    panel.set_title(f"{case.name}: {case.unit} ({better} is better; dashed: floor)", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
