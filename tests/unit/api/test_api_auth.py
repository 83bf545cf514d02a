from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from lull.api.auth import Authenticator, TokenFileError, new_token, read_or_create_token, read_token


def test_a_token_has_the_prefix_and_256_bits() -> None:
    tokens = {new_token() for _ in range(50)}
    assert len(tokens) == 50
    assert all(token.startswith("lull_") and len(token) == len("lull_") + 43 for token in tokens)


def test_the_first_start_makes_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        token = read_or_create_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_token(path) == token
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_servers_that_start_at_once_agree_on_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    start = threading.Barrier(8)
    seen: list[str] = []

    def begin() -> None:
        start.wait(10)
        seen.append(read_or_create_token(path))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 8
    assert len(set(seen)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(mode)
    with pytest.raises(TokenFileError, match=rf"others may read it \(mode {mode:04o}\); run: chmod 600 "):
        read_token(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"short", "at least 20 characters"),
        (b"lull_two words are not a token", "one word"),
        ("lull_ключключключключ".encode(), "ASCII"),
    ],
)
def test_a_file_without_a_good_token_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TokenFileError, match=says):
        read_token(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="no token file"):
        read_token(tmp_path / "absent")
    with pytest.raises(TokenFileError, match="not a regular file"):
        read_token(tmp_path)
    with pytest.raises(TokenFileError, match="cannot be created"):
        read_or_create_token(tmp_path / "no" / "token")


def test_only_the_whole_token_as_a_bearer_is_known() -> None:
    token = new_token()
    authenticator = Authenticator.of(token, "ann")
    assert authenticator.principal_of(f"Bearer {token}".encode()) == "ann"
    assert authenticator.principal_of(f"bearer  {token} ".encode()) == "ann"
    for given in (None, b"", b"Bearer", b"Bearer ", token.encode(), f"Basic {token}".encode(), b"Bearer \xff\xfe"):
        assert authenticator.principal_of(given) is None
    assert authenticator.principal_of(f"Bearer {token[:-1]}".encode()) is None
    assert authenticator.principal_of(f"Bearer {token}x".encode()) is None
