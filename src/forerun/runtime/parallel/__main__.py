"""`python -m forerun.runtime.parallel` is a follower that `start.lead` has started."""

from __future__ import annotations

from forerun.runtime.parallel.start import run_worker

run_worker()
