"""The list of checks: what the documentation says of it, and how it is asked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lull.agents.doctor.checks import CHECKS
from lull.agents.doctor.examine import examine
from lull.agents.doctor.findings import Finding, Status, failed, ok, warning, worst
from lull.agents.doctor.scene import Check, Scene

DOCUMENT = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_the_document_lists_every_check_as_it_is() -> None:
    lines = DOCUMENT.read_text().splitlines()
    table = lines[lines.index("<!-- checks -->") + 1 : lines.index("<!-- end of checks -->")]
    assert table[2:] == [f"| `{check.name}` | {check.group} | {check.about} |" for check in CHECKS]


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


def test_the_worst_finding_decides() -> None:
    assert worst([]) is Status.NOT_APPLICABLE
    assert worst([Status.OK, Status.NOT_APPLICABLE]) is Status.OK
    assert worst([Status.OK, Status.FAILED, Status.WARNING]) is Status.FAILED


def _answers(finding: Finding) -> Check:
    return Check("answers", "test", "It answers.", lambda scene: [finding], needs_settings=False)


def test_a_check_that_hangs_is_told_and_the_others_are_too(tmp_path: Path) -> None:
    never = threading.Event()

    def hang(scene: Scene) -> list[Finding]:
        never.wait(60)
        return []

    hangs = Check("hangs", "test", "The disk answers.", hang, needs_settings=False, seconds_max=0.1)
    found = examine(tmp_path / "none", [hangs, _answers(ok("well"))])
    never.set()
    assert found.hanging == ("hangs",)
    assert [(one.check, one.status) for one in found.told] == [("hangs", "failed"), ("answers", "ok")]
    assert "0.1 s" in found.told[0].seen
    assert "the disk answers" in found.told[0].way_out


def test_a_check_that_fails_itself_is_told(tmp_path: Path) -> None:
    def breaks(scene: Scene) -> list[Finding]:
        raise PermissionError(13, "Permission denied")

    found = examine(tmp_path / "none", [Check("breaks", "test", "", breaks, needs_settings=False)])
    assert found.status is Status.FAILED
    assert "Permission denied" in found.told[0].seen


def test_without_settings_only_checks_that_need_none_are_asked(tmp_path: Path) -> None:
    needs = Check("needs", "test", "", lambda scene: [failed("asked", "")])
    found = examine(tmp_path / "none", [needs, _answers(warning("seen", "way"))])
    assert [one.status for one in found.told] == [Status.NOT_APPLICABLE, Status.WARNING]


def test_what_several_checks_look_at_is_looked_at_once(tmp_path: Path) -> None:
    looks: list[int] = []
    scene = Scene(tmp_path, None, "")

    def look() -> int:
        looks.append(1)
        return 7

    assert [scene.once("a", look), scene.once("a", look)] == [7, 7]
    assert len(looks) == 1

    def breaks() -> int:
        looks.append(1)
        raise OSError("no")

    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            scene.once("b", breaks)
    assert len(looks) == 2
