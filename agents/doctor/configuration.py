"""The agent's file, and the files of keys that it names."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..gates.webhook_call import read_secret
from ..key_files import KeyUnusable, read_header_key, read_key
from ..settings import AgentSettings
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene

_OTHERS = stat.S_IRWXG | stat.S_IRWXO

ReadKey = Callable[[Path], object]  # raises KeyUnusable


def check_config(scene: Scene) -> list[Finding]:
    if scene.settings is None:
        return [
            failed(line, "correct the file; docs/configuration.md has every key, --config names another file")
            for line in scene.config_error.splitlines()
        ]
    return [_judge_file(scene, scene.settings), *_judge_filled_in(scene)]


def _judge_file(scene: Scene, settings: AgentSettings) -> Finding:
    counts = f"{len(settings.devices)} devices, {len(settings.engines)} engines"
    if not settings.devices:
        return warning(f"{scene.config}: no device, so nothing can be lent", "add [[devices]]")
    return ok(f"{scene.config}: {counts}")


def _judge_filled_in(scene: Scene) -> list[Finding]:
    given = scene.filled_in
    if given.by:
        return [ok(f"{', '.join(given.values)} as {given.by} fills them in")]
    if given.assumed:
        seen = f"{', '.join(sorted(given.assumed))}: left to `lull up`, which was not found to run with this file"
        way = f"lull up --config {scene.config}; for `lull agent` alone, name them in the file"
        return [warning(f"{seen}; what needs them is not looked at", way)]
    return []


@dataclass(frozen=True, slots=True)
class KeyFile:
    """``trouble``: why it cannot be read; ``mode`` and ``owner_uid`` are 0 then."""

    path: Path
    field: str
    trouble: str = ""
    mode: int = 0
    owner_uid: int = 0
    content_trouble: str = ""  # why what it holds is no key


def judge_key_file(file: KeyFile, own_uid: int) -> Finding:
    subject = file.field
    if file.trouble:
        return failed(f"{file.path}: {file.trouble}", f"make the file, or correct {file.field} in the file", subject)
    if file.content_trouble:
        return failed(f"{file.path} {file.content_trouble}", "write the key into it, and nothing else", subject)
    if file.mode & _OTHERS:
        seen = f"{file.path} has mode {file.mode:04o}: other users can read or change it"
        return failed(seen, f"chmod 0600 {file.path}", subject)
    if file.owner_uid not in (own_uid, 0):
        seen = f"{file.path} belongs to user {file.owner_uid}, and this is user {own_uid}"
        return warning(seen, f"chown {own_uid} {file.path}", subject)
    return ok(f"{file.path} has mode {file.mode:04o}", subject)


def look_at_key_file(path: Path, field: str, read: ReadKey) -> KeyFile:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return KeyFile(path, field, trouble="is no file")
        with open(path, "rb"):
            pass
    except OSError as error:
        return KeyFile(path, field, trouble=error.strerror or str(error))
    try:
        read(path)
        trouble = ""
    except KeyUnusable as error:
        trouble = str(error)
    return KeyFile(path, field, "", stat.S_IMODE(status.st_mode), status.st_uid, trouble)


def key_files(settings: AgentSettings) -> Iterator[tuple[Path, str, ReadKey]]:
    """Every file of a secret, with the field that names it, and how the agent reads it."""
    yield settings.token_file, "token_file", read_header_key
    for engine in settings.engines:
        if engine.control_key_file is not None:
            read = read_key if engine.kind == "trtllm" else read_header_key  # that one signs with it
            yield engine.control_key_file, f"engines.{engine.name}.control_key_file", read
        if engine.api_key_file is not None:
            yield engine.api_key_file, f"engines.{engine.name}.api_key_file", read_header_key
        if engine.webhook is not None:
            yield engine.webhook.secret_file, f"engines.{engine.name}.webhook.secret_file", read_secret
        if engine.kubernetes is not None and engine.kubernetes.client_key_file is not None:
            yield engine.kubernetes.client_key_file, f"engines.{engine.name}.kubernetes.client_key_file", read_key


def check_key_files(scene: Scene) -> list[Finding]:
    own_uid = os.geteuid()
    named = [one for one in key_files(scene.known) if one[1] not in scene.filled_in.assumed]
    found = [judge_key_file(look_at_key_file(path, field, read), own_uid) for path, field, read in named]
    return found or [not_applicable("no key file is named")]


CHECKS = (
    Check("config", "configuration", "The agent's file can be read and every key is known.", check_config, False),
    Check("key_files", "configuration", "Token and key files are there, private, and hold a key.", check_key_files),
)
