"""One bearer token, kept in a file that only its owner can read; there is no anonymous mode.

The server keeps only the token's SHA-256 and compares in constant time. The principal's name is recorded with every
job and event.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKEN_PREFIX: Final = "lull_"  # noqa: S105  secret scanners find tokens by it
TOKEN_CHARACTERS_MIN: Final = 20
OPERATOR: Final = "operator"


class TokenFileError(Exception):
    """The token file cannot be used. The message names the file and the way out."""


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Tells whose token a request carries."""

    digest: bytes
    principal: str = OPERATOR

    @classmethod
    def of(cls, token: str, principal: str = OPERATOR) -> Authenticator:
        return cls(hashlib.sha256(token.encode()).digest(), principal)

    def principal_of(self, authorization: bytes | None) -> str | None:
        """The principal of an ``Authorization`` header's value, or None."""
        if authorization is None:
            return None
        scheme, _, token = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given = hashlib.sha256(token.strip()).digest()
        return self.principal if hmac.compare_digest(given, self.digest) else None


def new_token() -> str:
    """256 random bits behind the prefix."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def read_token(path: Path) -> str:
    """The token in ``path``; raises TokenFileError when the file is missing, empty or readable by others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block the start
    except FileNotFoundError:
        raise TokenFileError(f"{path}: there is no token file") from None
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenFileError(f"{path}: is not a regular file")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise TokenFileError(f"{path}: others may read it (mode {mode:04o}); run: chmod 600 {path}")
        content = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise TokenFileError(f"{path}: a token is ASCII text on one line") from None
    if not token:
        raise TokenFileError(f"{path}: is empty; remove it, so that the next start makes a new token")
    if len(token.split()) != 1 or len(token) < TOKEN_CHARACTERS_MIN:
        raise TokenFileError(
            f"{path}: a token is one word of at least {TOKEN_CHARACTERS_MIN} characters;"
            " remove the file, so that the next start makes a new one"
        )
    return token


def read_or_create_token(path: Path) -> str:
    """The token in ``path``, made at the first start. Two servers that start at once agree on one token."""
    if not path.exists():
        _create(path, new_token())
    return read_token(path)


def _create(path: Path, token: str) -> None:
    # Written whole under another name and linked into place, so that nobody ever reads half a token.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be created: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # another server was first: its token counts
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        draft.unlink(missing_ok=True)
