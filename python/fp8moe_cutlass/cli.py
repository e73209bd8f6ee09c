"""fp8moe-cutlass doctor | verify | train."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

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

    from .train import Trainer

app = typer.Typer(
    help="Casting-free blockwise FP8 for Mixture-of-Experts: look at, check and train.",
    no_args_is_help=True,
    add_completion=False,
)
Device = Annotated[str, typer.Option(help="cpu, or cuda for the first GPU.")]
Seed = Annotated[int, typer.Option(min=0)]


def main() -> None:
    """The console script. A user's mistake is one line and exit code 2, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale may lack what is written: ? stands for it
            stream.reconfigure(errors="replace")
    try:
        app()
    # OSError: a path that cannot be read or written.
    except (ValueError, OSError, DeviceUnavailable, UnsupportedDevice, VersionMismatch) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {rich.markup.escape(str(error))}")
        raise SystemExit(2) from None


def console_for_tables() -> Console:
    """As wide as the terminal; wide enough for a table where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


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


# ---- doctor -------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """What was built, what is here, and what would run where."""
    from .doctor import report

    console = Console()
    tick = "✓" if console.encoding.startswith("utf") else "+"
    for title, findings in report().items():
        console.print(f"\n[bold]{title}[/]")
        for f in findings:
            mark = {None: " ", True: f"[green]{tick}[/]", False: "[yellow]![/]"}[f.good]
            console.print(f"{mark} {f.topic:<13} {rich.markup.escape(f.text)}", soft_wrap=True)


# ---- verify -------------------------------------------------------------------------------------


@app.command()
def verify(device: Device = "cpu", seed: Seed = 0) -> None:
    """Check every operator against an independent reference, here. Exit code 1 if one fails."""
    place = device_of(device)
    from .verify import run

    table = Table("operator", "case", "contract", "measured", "")
    results = []
    for check in run(place, seed):
        results.append(check)
        mark = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(check.op, check.case, check.contract, check.measured, mark)
    console = console_for_tables()
    console.print(table)
    failed = sum(not check.passed for check in results)
    console.print(f"{len(results) - failed} of {len(results)} checks passed on {device}")
    raise typer.Exit(1 if failed else 0)


# ---- train --------------------------------------------------------------------------------------


class Stop:
    """When to stop: Ctrl-C (after the step it came in), a step, or a deadline."""

    def __init__(self, at: int | None, minutes: float | None) -> None:
        if minutes is not None and not minutes >= 0:
            raise ValueError(f"--minutes must be at least 0; got {minutes}")
        self.at = at
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.asked = False

    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def __call__(self, trainer: Trainer) -> bool:
        return self.asked or self.left() <= 0 or trainer.step == self.at

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C asks to stop, a second one stops at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@app.command()
def train(
    device: Device = "cpu",
    text: Annotated[
        Path | None, typer.Option(help="A file or folder; default: Python's standard library.")
    ] = None,
    every_python: Annotated[
        bool, typer.Option("--every-python", help="The text: also all installed packages' sources.")
    ] = False,
    size: Annotated[str, typer.Option(help="tiny (seconds), small (minutes) or h200.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: the size's.")] = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.")] = 1,
    out: Annotated[Path, typer.Option(help="Where checkpoints and curves go.")] = Path(
        "runs/train"
    ),
    resume: Annotated[bool, typer.Option(help="Continue from what is in --out.")] = False,
    stop_at: Annotated[
        int | None, typer.Option(min=1, help="Stop each run after this step.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; --resume goes on.")
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option("--ep", help="Processes (on GPUs: a GPU each) to share the experts among."),
    ] = None,
) -> None:
    """Train a byte-level MoE transformer on real text in FP8 and in bf16, and compare."""
    place = device_of(device)
    from . import train as training
    from .launch import processes

    training.settle(place)
    config = training.configure(size, steps, seed)
    stop = Stop(stop_at, minutes)
    with processes(ep, place) as place:
        ranks = training.Alone() if ep is None else training.Ranks()
        console = Console(quiet=ranks.rank > 0)
        corpus = training.load(text, config.model.context, every_python=every_python)
        console.print(
            f"{len(corpus.train) / 1e6:.1f} MB of {corpus.name}, "
            f"{len(corpus.heldout) / 1e6:.1f} MB held out\n"
            f"unigram entropy of the text: {corpus.unigram_entropy:.3f} nats a byte"
        )
        progress = progress_bars(console, config.steps)
        try:
            with stop.on_interrupt(), progress as on_step:
                result = training.train(
                    config,
                    corpus,
                    place,
                    out,
                    seeds=seeds,
                    resume=resume,
                    on_step=on_step,
                    stop=stop,
                    left=stop.left,
                    ranks=ranks,
                )
        except training.Paused as paused:
            console.print(f"{paused}; the same command with --resume continues, bit for bit")
            return
    if ranks.rank > 0:
        return
    training.plot(result, out / "loss.png")
    console.print(f"wrote {out / 'loss.json'} and {out / 'loss.png'}")
    summary(console_for_tables(), result)
    console.print("\n[bold]What the FP8 model writes[/]")
    console.print(harmless(result["runs"][0]["sample"]), markup=False, highlight=False)


def harmless(text: str) -> str:
    """The text of a model, which may write any byte, without what would command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@contextmanager
def progress_bars(console: Console, steps: int) -> Iterator[Any]:
    """A progress bar a run, with loss and tokens/s; yields the callback of a step."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def on_step(trainer: Trainer) -> None:
            name = trainer.name
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=steps, loss=0.0, rate=0.0)
            loss, rate = trainer.latest_loss, trainer.tokens_per_second()
            bar.update(tasks[name], completed=trainer.step, loss=loss, rate=rate)
            step, heldout = trainer.curve.heldout[-1] if trainer.curve.heldout else (0, 0.0)
            if step == trainer.step:
                console.print(f"{name:>14} step {step:5}: held-out loss {heldout:.4f}")

        yield on_step


def summary(console: Console, result: dict[str, Any]) -> None:
    """Held-out losses of the last tenth beside the unigram entropy, and deviations from bf16."""
    heading = ("held-out loss, nats a byte", "between seeds", "from bf16", "training", "tokens/s")
    table = Table("mean over the last 10% of steps", *heading)
    table.add_row("unigram entropy", f"{result['unigram_entropy']:.4f}")
    for name, found in result["summary"].items():
        rates = [r["tokens_per_second"] for r in result["runs"] if r["variant"] == name]
        deviations = (found.get(f"{of}_deviation") for of in ("heldout", "training"))
        table.add_row(
            name,
            f"{found['heldout']:.4f}",
            f"{100 * found['spread']:.3f}%" if len(rates) > 1 else "",
            *("" if d is None else f"{100 * d:+.3f}%" for d in deviations),
            f"{sum(rates) / len(rates):,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
