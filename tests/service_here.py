"""A memory service in a thread of the test, where a test has to reach into it; all others are processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lull.vmm.service.client import ServiceClient
from lull.vmm.service.holdings import Holdings
from lull.vmm.service.server import Server


@contextmanager
def service_here(
    holdings: Holdings, path: Path, *, allowed_uids: Collection[int] | None = None
) -> Iterator[Callable[[], ServiceClient]]:
    """``allowed_uids``: exactly these, as if the service were somebody else's."""
    server = Server(holdings, path)
    if allowed_uids is not None:
        server._allowed_uids = set(allowed_uids)
    thread = threading.Thread(target=server.run)
    thread.start()
    clients: list[ServiceClient] = []

    def connect() -> ServiceClient:
        clients.append(ServiceClient(path))
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.close()
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
        assert not path.exists()
