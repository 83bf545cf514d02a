"""The demo's traffic: a process of its own that sends requests all the time and never retries one.

Every request is written down twice, when it is sent and when it has ended, so a request that got lost shows. Each goes
over a fresh connection: nothing can be blamed on one that was kept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

PROMPT: Final = "The quick brown fox"
TOKENS: Final = 2
ANSWER_SECONDS_MAX: Final = 900.0  # longer than any gate holds a request
REQUESTS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as its client saw it. Times are the machine's monotonic clock."""

    number: int
    model: str
    sent: float
    first_byte: float | None = None
    ended: float | None = None
    status: int | None = None
    error: str | None = None

    @property
    def answered(self) -> bool:
        return self.ended is not None and self.status == 200 and self.error is None


def send(host: str, port: int, number: int, model: str, stream: bool) -> Record:
    """One request from its first to its last byte."""
    sent = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS_MAX)
    first_byte: float | None = None
    status: int | None = None
    try:
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status = response.status
        content = response.read(1)
        first_byte = time.monotonic()
        content += response.read()
        error = fault_of(status, content, stream)
    except (OSError, http.client.HTTPException) as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        connection.close()
    return Record(number, model, sent, first_byte, time.monotonic(), status, error)


def fault_of(status: int, content: bytes, stream: bool) -> str | None:
    """What is wrong with an answer; None if it is whole."""
    if status != 200:
        return f"status {status}: {content[:200].decode(errors='replace')}"
    if stream:
        return None if content.rstrip().endswith(b"data: [DONE]") else "the stream broke off"
    try:
        choices: list[dict[str, Any]] = json.loads(content)["choices"]
    except (ValueError, KeyError, TypeError):
        return "the answer is no completion"
    return None if choices and choices[0].get("text") is not None else "the answer has no text"


def read_records(path: Path) -> list[Record]:
    """The last word on every request; one that never ended has no `ended`."""
    latest: dict[int, Record] = {}
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except ValueError:
            continue  # the line that is being written
        latest[record.number] = record
    return [latest[number] for number in sorted(latest)]


class Load:
    """Several threads for each model, each with one request at a time, until `stop` is set."""

    def __init__(self, host: str, port: int, out: Path, interval_seconds: float) -> None:
        self.stop = threading.Event()
        self._address = host, port
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._number = 0
        self._out = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def run(self, model: str, stream: bool) -> None:
        while not self.stop.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            if number > REQUESTS_MAX:
                return
            began = time.monotonic()
            self._write(Record(number, model, began))
            self._write(send(*self._address, number, model, stream))
            self.stop.wait(max(0.0, began + self._interval_seconds - time.monotonic()))

    def _write(self, record: Record) -> None:
        os.write(self._out, json.dumps(asdict(record)).encode() + b"\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Steady requests to a gateway, none of them retried.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", action="append", required=True, dest="models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interval-seconds", type=float, default=0.2)
    given = parser.parse_args(arguments)
    load = Load(given.host, given.port, given.out, given.interval_seconds)

    def end(*_: object) -> None:
        load.stop.set()

    signal.signal(signal.SIGTERM, end)
    threads = [
        threading.Thread(target=load.run, args=(model, stream), name=f"{model} {'stream' if stream else 'whole'}")
        for model in given.models
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
