"""What a server is told at its start: where it listens, whom it serves, and the bounds of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

KEY_VARIABLE = "HEADSTART_API_KEY"
"""The variable of the environment that holds a key, where none is given."""
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one request may hold; beyond it a request is refused by name (400, or 413 for its bytes).

    `body_seconds`: longest that a body may take to arrive.
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    depth: int = 64
    messages: int = 2048
    prompts: int = 256
    samples: int = 64
    stops: int = 16
    stop_characters: int = 1024
    stop_token_ids: int = 256
    logit_bias: int = 1024
    bad_words: int = 256
    tools: int = 128
    constraint_bytes: int = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of one server; checked when built.

    api_keys: any of them opens every endpoint but `/health`; none leaves all open. model_names: what the model is
    called here; the first is what answers say. default_max_tokens: longest answer of requests that do not say (by
    default what the context leaves to a chat, and 16 to a completion, as with OpenAI). sampling_defaults: what a
    model's generation config recommends for requests that do not say. max_seconds: longest that a request may take,
    waiting included. max_connections: requests under way at once. reasoning, tools: parsers (`infer.serve.parsing`) of
    answers; None leaves them whole. log_requests: a line for each request, without text.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_names: tuple[str, ...] = ("model",)
    default_max_tokens: int | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    max_seconds: float = 600.0
    max_connections: int = 1024
    allowed_origins: tuple[str, ...] = ()
    reasoning: str | None = None
    tools: str | None = None
    log_requests: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"model_names is {self.model_names!r}: give the model at least one name that is not empty")
        if not all(self.api_keys):
            raise ValueError("an API key is empty: give each some characters, or none to leave the server open")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 (any free one) to 65535, got {self.port}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ValueError(f"the default of max_tokens must be at least 1, got {self.default_max_tokens}")
        if not self.max_seconds > 0:
            raise ValueError(f"the longest time of a request must be above 0 seconds, got {self.max_seconds}")
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, got {self.max_connections}")

    @property
    def model_name(self) -> str:
        """What answers say they are from."""
        return self.model_names[0]
