"""`lull bench memory`, small: its figures mean nothing, its document and its exits do."""

from __future__ import annotations

import json
import mmap

import typer
from typer.testing import CliRunner

from lull.cli.bench_memory import bench_memory

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("memory")(bench_memory)
SMALL = ["--size", "4MiB", "--attach-size", "4MiB", "--repetitions", "1", "--threads", "1"]


def test_one_document_with_everything_side_by_side() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["targets_met"]) == (0, True)  # so small that its times are not judged
    assert [case["pages"] for case in document["cases"]] == ["huge", "ordinary"]
    assert document["cases"][1]["huge_pages_granted_bytes"] == 0
    for case in document["cases"]:
        assert case["size_bytes"] == 4 << 20
        assert set(case["floor_seconds"]) == {"memcpy_warm", "memcpy_fresh", "memcpy_fresh_private", "unmap_release"}
        assert set(case["lull_seconds"]) == {"CPU", "PINNED"}
        copied = [check for check in case["targets"] if check["name"] == "bytes copied by a second park"]
        assert [check["value"] for check in copied] == [0]
        for of in ("floors", "CPU", "PINNED"):
            assert all(cost["cpu_seconds"] >= 0 for cost in case["costs"][of].values())
    ordinary = document["cases"][1]
    pages = ordinary["size_bytes"] // mmap.PAGESIZE
    assert ordinary["costs"]["floors"]["memcpy_fresh"]["page_faults"] >= pages // 2, (
        "the copy's own, or the kernel's around"
    )
    assert ordinary["costs"]["PINNED"]["second_park"]["page_faults"] < pages // 10, "a park touches nothing"
    assert document["allocations"]["written_bytes_each"] < 1000, "a line of the ledger, not all of it"
    assert document["attach"]["attach_seconds"] > 0
    assert set(document["peers"]) == {"lull_on_cuda", "torch_memory_saver", "vllm"}


def test_what_is_small_is_shown_and_its_times_are_not_judged() -> None:
    result = CliRunner().invoke(app, SMALL)
    assert "targets met" in result.stdout
    assert "attach to 4MiB of committed weights" in result.stdout
    assert "MISSED" not in result.stdout
    assert result.exit_code == 0


def test_bad_sizes_are_refused() -> None:
    for size, text in (("4G", "ambiguous"), ("0", "more than 0")):
        result = CliRunner().invoke(app, ["--size", size])
        assert result.exit_code == 2
        assert text in result.output
    result = CliRunner().invoke(app, ["--size", "500TiB", "--attach-size", "1MiB"])
    assert result.exit_code == 1
    assert "out of host memory" in result.output
