"""Whether a server can listen where it was told to, asked before a model is loaded for nothing.

Knows: addresses and ports. Does not know: servers.
"""

from __future__ import annotations

import socket

from forerun.errors import ConfigError

LARGEST_PORT = 65535


def check_address(host: str, port: int) -> None:
    """Raises ConfigError for a port that is none or is taken, and for a host this machine does not have."""
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigError(f"--port must be from 0 (takes a free one) to {LARGEST_PORT}; got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself will
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host"
            ) from error
