"""Whether a Ray cluster asks for a token, and what to say where it does not let a command in.

Knows: the call that any program of Ray makes first. Does not know: where tokens lie (`config`), what runs on clusters.

Since Ray 2.60 a head that `ray start` starts asks for one, while programs that connect send none by themselves. Sent to
a cluster that asks for none it would do harm: that one's workers could not call back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forerun.config import use_ray_token
from forerun.errors import ConfigError

ASK_S: Final = 5.0
FIRST_CALL: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
CURRENT: Final = Path("/tmp/ray/ray_current_cluster")  # what `auto` means, as Ray keeps it
FAILED: Final = ("failed to connect", "client connection timeout", "authenticat", "invalidauthtoken")


def send_token(address: str) -> None:
    """Have Ray send its token if the cluster asks for one, before Ray is imported. Raises ConfigError without one."""
    if asks_for_token(address) and not use_ray_token():
        raise ConfigError(_refused(address, "InvalidAuthToken"))


def asks_for_token(address: str) -> bool:
    """Whether what listens there refuses who has no token; `auto`: the cluster of this machine."""
    try:
        import grpc

        if address == "auto":
            address = CURRENT.read_text("utf-8").strip()
        direct = [("grpc.enable_http_proxy", 0)]  # as Ray connects
        with grpc.insecure_channel(address.removeprefix("ray://"), options=direct) as channel:
            channel.unary_unary(FIRST_CALL)(b"", timeout=ASK_S)
    except (ImportError, OSError, UnicodeDecodeError):
        return False
    except grpc.RpcError as error:
        return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def refused(address: str, error: Exception) -> str | None:
    """What to say where something listens at an address of Ray, but Ray could not connect; None for other errors.

    Ray writes that a token is wrong into its own log, so that its error only says that it failed to connect.
    """
    said = " ".join(str(error).split())
    return _refused(address, said) if any(words in said.lower() for words in FAILED) else None


def _refused(address: str, why: str) -> str:
    return (
        f"the Ray cluster at {address} does not let this command in. Most likely it asks for a token, as since Ray "
        "2.60, that is missing here or another one: copy ~/.ray/auth_token of its head to the same place here, or set "
        "RAY_AUTH_TOKEN, and let RAY_AUTH_MODE be unset or token. Else it runs another release of Ray, or is none "
        f"({why:.300})"
    )
