"""What ``sglite serve`` does, over the scripted model's worker: a server without weights for the soak."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import listen, serve_on, url_of
from sglite.runtime.worker.supervisor import Hooks, Supervisor

WORKER = (sys.executable, str(Path(__file__).parent / "scripted_worker.py"))
ENGINE = {"threads": 1, "context_length": 2048, "kv_tokens": 32_768, "max_running": 64, "max_queue": 256}


def main() -> None:
    config = ServerConfig(port=0, write_timeout=5.0, drain_timeout=10.0, max_concurrency=320)
    with listen(config) as listener:
        ready = lambda: print(f"sglite: serving at {url_of(listener)}", file=sys.stderr, flush=True)  # noqa: E731
        hooks = Hooks(ready, lambda: os.kill(os.getpid(), signal.SIGTERM))
        supervisor = Supervisor(ENGINE, command=WORKER, hooks=hooks)
        serve_on(listener, supervisor, config, None, lambda url: supervisor.start())
    if supervisor.failure is not None:
        sys.exit(str(supervisor.failure))


if __name__ == "__main__":
    main()
