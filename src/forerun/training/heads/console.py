"""Shows the training of a head.

Knows how a line of the history reads. Knows nothing of training.
"""

from __future__ import annotations

from forerun.training.console import Console
from forerun.training.heads.train import HeadReport


class HeadConsole(Console):
    """Watches the training of a head on standard output; see `train.HeadWatcher`."""

    def show(self, report: HeadReport) -> None:
        """Shows one line of the history."""
        if self.progress is not None:
            for task in self.progress.task_ids:
                self.progress.update(task, completed=report.step, description=f"loss {report.loss:.3f}")
        if report.acceptance_length is not None or not self.output.is_terminal:
            self.say(report_line(report))


def report_line(report: HeadReport) -> str:
    """Describes one line of the history."""
    line = (
        f"step {report.step} tokens {report.tokens} loss {report.loss:.4f} "
        f"lr x{report.learning_rate_scale:.3f} {report.tokens_per_s:.0f} tokens/s"
    )
    if report.acceptance_length is None:
        return line
    depths = " ".join(f"{rate:.2f}" for rate in report.acceptance_by_depth)
    return f"{line} | simulated acceptance length {report.acceptance_length:.3f}, by depth {depths}"
