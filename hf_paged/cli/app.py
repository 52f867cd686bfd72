"""The commands: what they are called, what they take, and what exit status they end with.

Each is a thin shell: it imports the part that does the work when it runs, and prints what that part returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="hf-paged",
    help="Paged, shared KV blocks for stock Hugging Face transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from hf_paged import __version__

        typer.echo(f"hf-paged {__version__}")
        raise typer.Exit


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """What is in use here, what is missing and how to get it. Exit status 0 when hf_paged can be used."""
    from hf_paged import doctor
    from hf_paged.cli import show_doctor

    report = doctor.examine()
    show_doctor.as_json(report) if json else show_doctor.as_tables(report)
    raise typer.Exit(0 if report.usable else 1)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="A model id, a folder, or 'demo' for the bundled SmolLM2-135M.")] = "demo",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 32,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, a smaller batch, fewer beams.")] = False,
) -> None:
    """Show paged generate() beside stock generate(). Exit status 1 if a token differs that was not a tie."""
    from hf_paged.cli import show_demo
    from hf_paged.demo import Settings
    from hf_paged.errors import HfPagedError

    try:
        settings = Settings(model=model, dtype=dtype, max_new_tokens=max_new_tokens, quick=quick)
        identical = show_demo.run(settings)
    except HfPagedError as error:
        typer.echo(f"hf-paged demo: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(0 if identical else 1)


@app.command()
def bench(
    model: Annotated[
        str, typer.Argument(help="A model id, a folder, or 'demo' for the bundled SmolLM2-135M.")
    ] = "demo",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    workloads: Annotated[
        Path | None, typer.Option(help="A file of token ids; W1-W5 without. Its form: help(hf_paged.bench.workload).")
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="The workloads' lengths and shared prefixes with random token ids.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Entries of the file, such as W1,W3.")] = None,
    peers: Annotated[str | None, typer.Option(help="Such as hf-paged,stock; all without.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of each figure.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each peer; all cores without.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one run of one peer.")] = 900.0,
    accept_load: Annotated[
        bool, typer.Option("--accept-load", help="Print figures that other processes disturbed, marked.")
    ] = False,
    agreement: Annotated[
        bool, typer.Option("--agreement/--no-agreement", help="Compare greedy tokens with fp32 stock's.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the chart and the peers' logs.")] = Path(
        "hf-paged-bench"
    ),
) -> None:
    """Measure hf_paged beside stock transformers, and other engines where a checkout has them installed.

    Exit status 1 if a peer failed, 2 if nothing could be measured.
    """
    from rich.console import Console

    from hf_paged.errors import HfPagedError

    try:
        from hf_paged.bench import command
        from hf_paged.bench.runner import Settings
    except ModuleNotFoundError as error:
        typer.echo(f"hf-paged bench needs {error.name}: pip install 'hf-paged[bench]'", err=True)
        raise typer.Exit(2) from error
    try:
        settings = Settings(
            dtype=dtype,
            threads=threads or command.cores(),
            repeats=repeats,
            timeout=timeout,
            accept_load=accept_load,
            agreement=agreement,
        )
        request = command.Request(
            model=model,
            workloads=workloads,
            synthetic=synthetic,
            only=only.split(",") if only is not None else None,
            peers=peers.split(",") if peers is not None else None,
            out=out,
            settings=settings,
        )
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        results = command.run(request, console)
    except HfPagedError as error:
        typer.echo(f"hf-paged bench: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(1 if results.failed else 0)
