"""Every option of the server, written once: the CLI and the docs read this dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglite.errors import ConfigError


def _option(default: Any, help: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"help": help}, repr=not secret)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and the bounds on what clients may send. Sizes are bytes, times seconds."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(30000, "port to listen on (0: any free one)")
    served_name: str = _option("", "name of the model in /v1 routes (default: the model's own)")
    tool_format: str = _option(
        "auto", "how the model writes tool calls: auto or a family (hermes, llama3, mistral, deepseek)"
    )
    reasoning_format: str = _option(
        "auto", "how the model writes reasoning: auto, none or a family (qwen3, deepseek-r1)"
    )
    api_keys: tuple[str, ...] = _option(
        (), "keys that clients may use (default: $SGLITE_API_KEYS, with commas)", secret=True
    )
    admin_key: str = _option("", "key for admin routes (default: $SGLITE_ADMIN_KEY)", secret=True)
    allowed_hosts: tuple[str, ...] = _option((), "names by which clients may call (default: loopback's, if there)")
    log_format: str = _option("text", "how log lines are written: text, or json (one object a line)")
    log_level: str = _option("warning", "least level of log lines: debug, info (a line a request), warning or error")
    otlp_endpoint: str = _option("", "OTLP/HTTP address that gets OpenTelemetry spans (needs the extra otel)")
    max_concurrency: int = _option(
        0, "most generation requests at once; more are refused with 429 (0: as many as the engine computes and queues)"
    )
    max_connections: int = _option(8192, "most open connections; more are refused with 503")
    key_concurrency: int = _option(0, "most generation requests at once of one key (0: no limit)")
    rate_limit: int = _option(0, "most generation requests a minute of one key (0: no limit)")
    data_folder: str = _option("", "where files and batches are kept (default: in the cache folder, by port)")
    batch_concurrency: int = _option(16, "most requests of a batch at once")
    max_body: int = _option(1 << 20, "largest request body")
    max_upload: int = _option(200 << 20, "largest file that may be uploaded")
    max_headers: int = _option(16 << 10, "largest sum of request headers")
    max_depth: int = _option(64, "deepest nesting of a JSON body")
    max_batch: int = _option(64, "most prompts in one request")
    max_samples: int = _option(256, "most answers of one request: prompts times n")
    read_timeout: float = _option(30.0, "longest wait for a request's body")
    write_timeout: float = _option(30.0, "longest wait for a client that does not read its stream")
    request_timeout: float = _option(600.0, "longest time a request may take")
    drain_timeout: float = _option(10.0, "time that running requests get to finish at shutdown")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r:.40}")
        for name in (
            "max_body",
            "max_upload",
            "max_headers",
            "max_depth",
            "max_batch",
            "max_samples",
            "max_connections",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_concurrency", "key_concurrency", "rate_limit"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        if any(not key or not key.isascii() for key in (*self.api_keys, self.admin_key or "x")):
            raise ConfigError("an API key must not be empty, and plain ASCII")
        for name in ("read_timeout", "write_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")


_KNOWN = {"log_format": ("text", "json"), "log_level": ("debug", "info", "warning", "error")}
