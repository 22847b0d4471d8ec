"""``python -m sglite.runtime.worker SOCKET PARENT``: what the supervisor starts."""

from sglite.runtime.worker.child import main

main()
