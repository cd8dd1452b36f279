"""Shows a training run: a progress bar on a terminal, plain lines elsewhere.

Knows how progress looks and what Ctrl-C does: the current step ends, the run is saved. Knows nothing of training.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich import console as rich_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.training.train import StepReport


class Console:
    """Watches a run on standard output; see `train.Watcher`."""

    def __init__(self) -> None:
        self.output = rich_console.Console(highlight=False, soft_wrap=True)
        self.stopping = False
        self.progress: Progress | None = None

    def say(self, text: str) -> None:
        """Prints one line."""
        self.output.print(text, markup=False)

    @contextmanager
    def watching(self, num_steps: int, first_step: int) -> Iterator[None]:
        """Shows progress, and turns the first Ctrl-C or SIGTERM into a stop after the current step."""
        previous = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.output, disable=not self.output.is_terminal) as self.progress:
            self.progress.add_task("training", total=num_steps, completed=first_step)
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Asks for a stop; a second signal interrupts at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self.say("stopping after this step; once more to stop at once")

    def should_stop(self) -> bool:
        """Tells whether a stop was asked for."""
        return self.stopping

    def on_report(self, report: StepReport) -> None:
        """Shows one line of the history."""
        if self.progress is not None:
            for task in self.progress.task_ids:
                self.progress.update(task, completed=report.step, description=f"loss {report.loss:.3f}")
        if report.heldout or not self.output.is_terminal:
            self.say(report_line(report))


def report_line(report: StepReport) -> str:
    """Describes one line of the history."""
    heldout = " ".join(f"{domain} {bits:.3f}" for domain, bits in report.heldout.items())
    return (
        f"step {report.step} tokens {report.tokens} loss {report.loss:.4f} "
        f"lr x{report.learning_rate_scale:.3f} {report.tokens_per_s:.0f} tokens/s"
    ) + (f" | held-out bits per byte: {heldout}" if heldout else "")
