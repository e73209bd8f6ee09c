"""fp8moe-cutlass doctor | verify."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

try:
    import rich
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The command line needs {error.name}: pip install 'fp8moe-cutlass[cli]'"
    ) from None

from fp8moe_cutlass import DeviceUnavailable, UnsupportedDevice, VersionMismatch

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    help="Casting-free blockwise FP8 for Mixture-of-Experts: look and check.",
    no_args_is_help=True,
    add_completion=False,
)


def main() -> None:
    """The console script. A user's mistake is one line and exit code 2, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale may lack what is written: ? stands for it
            stream.reconfigure(errors="replace")
    try:
        app()
    except (ValueError, DeviceUnavailable, UnsupportedDevice, VersionMismatch) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {rich.markup.escape(str(error))}")
        raise SystemExit(2) from None


def device_of(name: str) -> torch.device:
    """The torch device; ValueError when torch or the GPU is not there."""
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError("this command needs torch: pip install 'fp8moe-cutlass[cli]'") from None
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda; got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU; `fp8moe-cutlass doctor` says more")
    return torch.device(name)


@app.command()
def doctor() -> None:
    """Say what was built, what is here, and what would run where."""
    from .doctor import report

    console = Console()
    tick = "✓" if console.encoding.startswith("utf") else "+"
    for title, findings in report().items():
        console.print(f"\n[bold]{title}[/]")
        for f in findings:
            mark = {None: " ", True: f"[green]{tick}[/]", False: "[yellow]![/]"}[f.good]
            console.print(f"{mark} {f.topic:<13} {rich.markup.escape(f.text)}", soft_wrap=True)


@app.command()
def verify(
    device: Annotated[str, typer.Option(help="cpu, or cuda for the first GPU.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Check every operator against an independent reference, here. Exit code 1 if one fails."""
    place = device_of(device)
    from .verify import run

    table = Table("operator", "case", "contract", "measured", "")
    results = []
    for check in run(place, seed):
        results.append(check)
        mark = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(check.op, check.case, check.contract, check.measured, mark)
    console = Console()
    if not console.is_terminal:  # a file or a pipe: wide enough for the table
        console = Console(width=160)
    console.print(table)
    failed = sum(not check.passed for check in results)
    console.print(f"{len(results) - failed} of {len(results)} checks passed on {device}")
    raise typer.Exit(1 if failed else 0)
