from __future__ import annotations

import pytest

from lull.agents.gateway.settings import Limits


@pytest.mark.parametrize(
    ("files_max", "clients"), [(1, 1), (16, 6), (128, 48), (1024, 384), (4096, 1920), (10**6, 20_000)]
)
def test_clients_and_their_engines_leave_files_for_everything_else(files_max: int, clients: int) -> None:
    limits = Limits().within_files(files_max)
    assert limits.connections_max == clients
    assert limits.requests_max == min(clients, 10_000)
    assert limits.body_bytes_max == Limits().body_bytes_max


def test_what_is_held_has_half_of_both() -> None:
    limits = Limits(requests_max=9, buffered_bytes_max=101)
    assert (limits.held_requests_max, limits.held_bytes_max) == (4, 50)
    assert Limits(requests_max=1).held_requests_max == 1
