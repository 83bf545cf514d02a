from __future__ import annotations

import pytest

from lull.agents.gateway.filtering import (
    check_query,
    inference_path,
    read_body,
    split_target,
)
from lull.agents.gateway.problems import Problem
from lull.agents.gateway.routes import RouteSpec
from lull.agents.gateway.settings import parse_listen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_inference_passes(path: str) -> None:
    assert inference_path("POST", path) == path


@pytest.mark.parametrize(
    "path",
    [
        "/release_memory",
        "/sleep",
        "/release_memory_occupation",  # SGLang
        "/wakeup",  # LMDeploy
        "/models/load",  # llama-server
        "/api/generate",  # ollama
        "/collective_rpc",  # vLLM
        "/v1/../release_memory",
        "/v1/completions/",
        "//v1/completions",
        "/V1/completions",
        "/v1/%63ompletions",
        "http://x/v1/completions",
        "/v1/completions;x",
        "",
        "*",
    ],
)
def test_every_other_spelling_is_unknown(path: str) -> None:
    with pytest.raises(Problem) as caught:
        inference_path("POST", path)
    assert caught.value.status == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "CONNECT", "post"])
def test_inference_is_post(method: str) -> None:
    with pytest.raises(Problem) as caught:
        inference_path(method, "/v1/completions")
    assert (caught.value.status, caught.value.allow) == (405, "POST")


def test_target_is_split_as_it_came() -> None:
    assert split_target("/v1/completions?a=%20&b=?#f") == ("/v1/completions", "a=%20&b=?")


@pytest.mark.parametrize("query", ["a b", "a\tb", "ü", "a\x7f"])
def test_queries_that_do_not_belong_into_a_request_line(query: str) -> None:
    with pytest.raises(Problem):
        check_query(query)


@pytest.mark.parametrize(
    ("body", "stream"), [(b'{"model":"m","stream":true}', True), (b'{"model":"m","stream":1}', False)]
)
def test_body_is_read_for_model_and_stream(body: bytes, stream: bool) -> None:
    assert read_body(body) == ("m", stream)


def test_cut_text_may_end_with_half_a_surrogate_pair() -> None:
    assert read_body(b'{"model": "m", "prompt": "\\ud83d"}') == ("m", False)


@pytest.mark.parametrize(
    "upstream",
    [
        "https://127.0.0.1:1",
        "127.0.0.1:1",
        "http://127.0.0.1",
        "http://h:1/v1",
        "http://u@h:1",
        "http://h:1?x",
        "http://h:x",
    ],
)
def test_upstreams_that_are_no_engine_address(upstream: str) -> None:
    with pytest.raises(ValueError, match="upstream"):
        RouteSpec(name="n", models=("m",), upstream=upstream)


@pytest.mark.parametrize("upstream", ["http://127.0.0.1:9001", "http://[::1]:9001", "http://engine:9001/"])
def test_upstreams(upstream: str) -> None:
    assert RouteSpec(name="n", models=("m",), upstream=upstream).upstream == upstream


def test_listen() -> None:
    assert parse_listen("127.0.0.1:8070") == ("127.0.0.1", 8070)
    assert parse_listen("[::1]:0") == ("::1", 0)
    for bad in ("8070", ":8070", "h:", "h:x", "h:70000", "h:-1", "h:²"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_listen(bad)
