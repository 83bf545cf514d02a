from __future__ import annotations

import threading

import pytest

from lull.vmm import signing
from lull.vmm.signing import (
    AUTH_HEADER,
    BAD_TIMESTAMP,
    CACHE_FULL,
    NO_KEY,
    NONCE_HEADER,
    NONCE_USED,
    NOT_AUTHENTIC,
    OUTSIDE_WINDOW,
    TIMESTAMP_HEADER,
    ControlAuthError,
    RequestVerifier,
    new_headers,
    sign,
)

KEY = b"secret"
NOW = 1_800_000_000
NONCE = "00112233445566778899aabbccddeeff"
BODY = b'{"tags":["model","model_weights"]}'


def nonce(number: int) -> str:
    return f"{number:032x}"


def headers(
    method: str = "POST", path: str = "/release_memory", body: bytes = BODY, **fields: int | str
) -> dict[str, str]:
    timestamp = fields.get("timestamp", NOW)
    return sign(KEY, method, path, body, timestamp=timestamp, nonce=str(fields.get("nonce", NONCE)))


def refusal(
    verifier: RequestVerifier,
    sent: dict[str, str],
    *,
    method: str = "POST",
    path: str = "/release_memory",
    body: bytes = BODY,
    now: float = NOW,
) -> str | None:
    try:
        verifier.verify(method, path, sent, body, now=now)
    except ControlAuthError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/release_memory", BODY, "89b639649e59bce18e3d0b35c32f676c2992b0ebde3e66b45c5645c53032a48f"),
        ("GET", "/memory_status", b"", "537e2f3a4c3ec82829d3e640b8c3de33dbbbea74538c9432bdece5eaebf55047"),
        ("POST", "/resume_memory", b"", "c05d2d412e3f86f066bfde679fc1cbcd8786199c9273b3361b5b325d27e84ef0"),
    ],
)
def test_known_answers(method: str, path: str, body: bytes, expected: str) -> None:
    signed = sign(KEY, method, path, body, timestamp=NOW, nonce=NONCE)
    assert signed == {AUTH_HEADER: f"sha256={expected}", TIMESTAMP_HEADER: str(NOW), NONCE_HEADER: NONCE}
    assert refusal(RequestVerifier(KEY), signed, method=method, path=path, body=body) is None


def test_the_method_is_signed_in_upper_case() -> None:
    assert sign(KEY, "post", "/resume_memory", b"", timestamp=NOW, nonce=NONCE) == headers(
        path="/resume_memory", body=b""
    )


def test_new_headers_never_repeat_a_nonce() -> None:
    verifier = RequestVerifier(KEY)
    sent = [new_headers(KEY, "POST", "/release_memory", BODY, now=NOW + 0.7) for _ in range(20)]
    assert [refusal(verifier, one) for one in sent] == [None] * 20
    assert sent[0][TIMESTAMP_HEADER] == str(NOW)


# -- the order of the checks: each request is wrong in the named way and in every later one


def test_step_1_no_key() -> None:
    assert refusal(RequestVerifier(b""), {}) == NO_KEY
    assert refusal(RequestVerifier([]), {}) == NO_KEY


@pytest.mark.parametrize("missing", [AUTH_HEADER, TIMESTAMP_HEADER, NONCE_HEADER])
def test_step_2_a_header_is_missing(missing: str) -> None:
    sent = headers()
    del sent[missing]
    assert refusal(RequestVerifier(KEY), sent) == NOT_AUTHENTIC


@pytest.mark.parametrize("timestamp", ["", "+1", "-1", "1.0", " 1", "1 ", "１８", "0x1", "1_0", "1\n"])
def test_step_3_bad_timestamps(timestamp: str) -> None:
    assert refusal(RequestVerifier(KEY), {**headers(), TIMESTAMP_HEADER: timestamp}) == NOT_AUTHENTIC
    with pytest.raises(ControlAuthError, match=NOT_AUTHENTIC):
        headers(timestamp=timestamp)


@pytest.mark.parametrize("bad", ["", NONCE[:-1], NONCE + "0", NONCE.upper(), NONCE + "\n", "g" * 32, "０" * 32])
def test_step_3_bad_nonces(bad: str) -> None:
    assert refusal(RequestVerifier(KEY), {**headers(), NONCE_HEADER: bad}) == NOT_AUTHENTIC


@pytest.mark.parametrize("path", ["", "release_memory", "/release_memory/", "/a?b", "/a#b", "/a\nb", "//"])
def test_step_3_bad_paths(path: str) -> None:
    assert refusal(RequestVerifier(KEY), headers(), path=path) == NOT_AUTHENTIC


@pytest.mark.parametrize("method", ["", "PO ST", "PÖST", "POST\n", "P0ST"])
def test_step_3_bad_methods(method: str) -> None:
    assert refusal(RequestVerifier(KEY), headers(), method=method) == NOT_AUTHENTIC


def test_the_root_path_may_be_signed() -> None:
    signed = sign(KEY, "GET", "/", b"", timestamp=NOW, nonce=NONCE)
    assert refusal(RequestVerifier(KEY), signed, method="GET", path="/", body=b"") is None


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda auth: auth.removeprefix("sha256="),
        lambda auth: auth + "0",
        lambda auth: f" {auth}",
        lambda _: "é",
        lambda _: "",
    ],
)
def test_step_4_the_signature_is_compared_whole(change: object) -> None:
    sent = headers()
    sent[AUTH_HEADER] = change(sent[AUTH_HEADER])  # type: ignore[operator]
    assert refusal(RequestVerifier(KEY), sent) == NOT_AUTHENTIC


@pytest.mark.parametrize(
    "other",
    [
        {"method": "GET"},
        {"path": "/resume_memory"},
        {"body": BODY + b" "},
    ],
)
def test_step_4_everything_is_signed(other: dict[str, object]) -> None:
    assert refusal(RequestVerifier(KEY), headers(), **other) == NOT_AUTHENTIC  # type: ignore[arg-type]


def test_step_4_another_key() -> None:
    signed = sign(b"other", "POST", "/release_memory", BODY, timestamp=NOW, nonce=NONCE)
    assert refusal(RequestVerifier(KEY), signed) == NOT_AUTHENTIC
    assert refusal(RequestVerifier([KEY, b"other"]), signed) is None


def test_step_5_more_digits_than_can_be_converted() -> None:
    assert refusal(RequestVerifier(KEY), headers(timestamp="1" * 4400)) == BAD_TIMESTAMP


@pytest.mark.parametrize(("offset", "accepted"), [(-301, False), (-300, True), (300, True), (301, False)])
def test_step_6_the_window_is_inclusive(offset: int, accepted: bool) -> None:
    assert refusal(RequestVerifier(KEY), headers(timestamp=NOW + offset)) == (None if accepted else OUTSIDE_WINDOW)


def test_leading_zeros_are_accepted_as_signed() -> None:
    assert refusal(RequestVerifier(KEY), headers(timestamp=f"000{NOW}")) is None


def test_step_7_a_nonce_counts_once_over_all_methods_and_paths() -> None:
    verifier = RequestVerifier(KEY)
    assert refusal(verifier, headers()) is None
    assert refusal(verifier, headers()) == NONCE_USED
    on_another_route = headers("GET", "/memory_status", b"", timestamp=NOW + 1)
    assert refusal(verifier, on_another_route, method="GET", path="/memory_status", body=b"") == NONCE_USED


def test_step_7_duplicate_is_said_before_full() -> None:
    verifier = RequestVerifier(KEY, capacity=1)
    assert refusal(verifier, headers()) is None
    assert refusal(verifier, headers()) == NONCE_USED


def test_step_8_a_full_store_fails_closed() -> None:
    verifier = RequestVerifier(KEY, capacity=1)
    assert refusal(verifier, headers(nonce=nonce(1))) is None
    assert refusal(verifier, headers(nonce=nonce(2))) == CACHE_FULL
    # Nothing was thrown out to make room.
    assert refusal(verifier, headers(nonce=nonce(1))) == NONCE_USED


def test_only_expired_nonces_are_forgotten() -> None:
    verifier = RequestVerifier(KEY, capacity=2)
    assert refusal(verifier, headers(timestamp=1000, nonce=nonce(1)), now=1000) is None
    assert refusal(verifier, headers(timestamp=1100, nonce=nonce(2)), now=1100) is None
    assert refusal(verifier, headers(timestamp=1300, nonce=nonce(3)), now=1300) == CACHE_FULL
    assert refusal(verifier, headers(timestamp=1301, nonce=nonce(3)), now=1301) is None
    assert refusal(verifier, headers(timestamp=1100, nonce=nonce(2)), now=1301) == NONCE_USED


def test_a_bad_request_uses_no_capacity() -> None:
    verifier = RequestVerifier(KEY, capacity=1)
    forged = {**headers(nonce=nonce(1)), AUTH_HEADER: "sha256=" + "0" * 64}
    assert refusal(verifier, forged) == NOT_AUTHENTIC
    assert refusal(verifier, headers(timestamp=NOW - 301, nonce=nonce(1))) == OUTSIDE_WINDOW
    assert refusal(verifier, headers(nonce=nonce(1))) is None


def test_the_standard_capacity() -> None:
    verifier = RequestVerifier(KEY)
    for number in range(signing.REPLAY_CAPACITY):
        verifier.verify("POST", "/release_memory", headers(nonce=nonce(number)), BODY, now=NOW)
    assert signing.REPLAY_CAPACITY == 4096
    assert refusal(verifier, headers(nonce=nonce(5000))) == CACHE_FULL


def test_of_concurrent_uses_exactly_one_is_accepted() -> None:
    verifier = RequestVerifier(KEY)
    answers: list[str | None] = []
    start = threading.Barrier(8)
    sent = headers()

    def use() -> None:
        start.wait(10)
        answers.append(refusal(verifier, sent))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers.count(None) == 1
    assert answers.count(NONCE_USED) == 7
