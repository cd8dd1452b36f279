"""A batch that a server was given, as OpenAI's Batch API tells of it.

Knows: states, and what is kept of a batch. Does not know: rows, folders.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from forerun.server.stored_files import new_id

WINDOW: Final = "24h"  # the one completion window of OpenAI's API; here nothing expires
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")  # states of batches that are not over
TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")  # states with a time


@dataclass(slots=True)
class BatchJob:
    """What is known of a batch."""

    id: str
    endpoint: str
    input_file_id: str
    created_s: float  # since 1970
    tenant: str  # whose it is, as in auth.TENANT
    metadata: dict[str, str] | None = None
    status: str = "validating"
    output_id: str = field(default_factory=lambda: new_id("file-"))
    errors_id: str = field(default_factory=lambda: new_id("file-"))
    times: dict[str, int] = field(default_factory=dict)  # when it came into a state
    total: int = 0
    completed: int = 0
    failed: int = 0
    written: list[str] = field(default_factory=list)  # of output_id and errors_id, those that are files
    why_failed: str | None = None

    def enter(self, status: str) -> None:
        """Note that it comes into a state."""
        self.status = status
        self.times[status] = int(time.time())

    def said(self) -> dict[str, Any]:
        """The batch object of OpenAI's API."""
        why = [{"code": "batch_failed", "message": self.why_failed, "line": None, "param": None}]
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.input_file_id,
            "completion_window": WINDOW, "status": self.status, "metadata": self.metadata,
            "errors": {"object": "list", "data": why} if self.why_failed else None,
            "output_file_id": self.output_id if self.output_id in self.written else None,
            "error_file_id": self.errors_id if self.errors_id in self.written else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "created_at": int(self.created_s), "expires_at": None, "expired_at": None,
            **{f"{status}_at": self.times.get(status) for status in TIMES},
        }  # fmt: skip
