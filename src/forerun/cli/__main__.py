"""`python -m forerun.cli` is the command `forerun`."""

from __future__ import annotations

from forerun.cli.app import main

main()
