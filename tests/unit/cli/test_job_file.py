from __future__ import annotations

from pathlib import Path

import pytest

from lull.cli.exits import CliError
from lull.cli.job_submit import parse_env, read_job_file


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_a_job_file_is_read_into_the_apis_names(tmp_path: Path) -> None:
    path = written(tmp_path, "argv: [python, train.py]\nhbm: 40GiB\ntime: 2h\ngpus: 2\nenv: {A: '1'}\n")
    assert read_job_file(path) == {
        "argv": ["python", "train.py"],
        "hbm_bytes": 40 << 30,
        "time_limit_seconds": 7200.0,
        "gpus": 2,
        "env": {"A": "1"},
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("argv: [a", "is not YAML"),
        ("- a", "has to be a mapping"),
        ("argv: [a]\nhmb: 1", "unknown key 'hmb'"),
        ("argv: python train.py", "argv: has to be a list of strings"),
        ("argv: [a]\nenv: {A: 1}", "put numbers in quotes"),
        ("argv: [a]\nhbm: 40G", "ambiguous"),
        ("argv: [a]\ntime: soon", "is no duration"),
        ("argv: [a]\nhbm: 1GiB\nhbm_bytes: 5", "both given"),
    ],
)
def test_a_bad_job_file_is_refused_by_file_and_key(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CliError, match=told) as refused:
        read_job_file(path)
    assert str(path) in str(refused.value)


def test_environment_pairs() -> None:
    assert parse_env(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(CliError, match="is not NAME=VALUE"):
        parse_env(["A"])
    with pytest.raises(CliError, match="is not NAME=VALUE"):
        parse_env(["1A=x"])
