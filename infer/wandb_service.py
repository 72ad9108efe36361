"""Whether Weights & Biases can be reached without asking anybody, and settings that keep it quiet.

For the runs of training and of the server, which import the package itself where they start one.
"""

from __future__ import annotations

import netrc
import os
import socket
import threading
from typing import Any
from urllib.parse import urlparse

WANDB_URL = "https://api.wandb.ai"
PROBE_SECONDS = 2.0
INIT_SECONDS = 15


def has_key() -> bool:
    """Whether wandb could go online without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(urlparse(service_url()).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def service_url() -> str:
    return os.environ.get("WANDB_BASE_URL") or WANDB_URL


def is_reachable(url: str, *, seconds: float = PROBE_SECONDS) -> bool:
    """Whether something listens there. Behind a proxy that cannot be told from here, and is taken for true."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    parts = urlparse(url)
    answered = threading.Event()
    connected: list[bool] = []

    def probe() -> None:
        try:
            port = parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
            connected.append(True)
        except (OSError, ValueError):
            pass
        answered.set()

    threading.Thread(target=probe, daemon=True).start()  # looking up a name heeds no timeout
    return answered.wait(seconds) and bool(connected)


def quiet_settings(wandb: Any, **limits: Any) -> Any:
    """Settings of a run that prints nothing and starts soon or not at all. Older versions know not all `limits`."""
    os.environ.setdefault("WANDB_SILENT", "true")
    known = getattr(wandb.Settings, "model_fields", {})
    kept = {name: value for name, value in limits.items() if name in known}
    return wandb.Settings(init_timeout=INIT_SECONDS, console="off", silent=True, **kept)
