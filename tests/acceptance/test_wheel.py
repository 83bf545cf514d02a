"""The built wheel, in an environment of its own with the sources out of reach."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("agents", "api", "bench", "cli", "migrations", "scheduler", "vmm")


def run(argv: Sequence[str], cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LULL_", "PYTHON"))}
    ended = subprocess.run(argv, env=environ, cwd=cwd, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "lull"
    # A copy, so that building leaves nothing in the checkout and picks up nothing that is not under version control.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "alembic.ini", *PACKAGES):
        if (ROOT / name).exists():
            run(["cp", "-r", str(ROOT / name), str(source)], ROOT)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)], out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this one, the editable install is not."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home).strip())
    # A plain path in a .pth file: its own .pth files, and with them the editable install, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--ignore-installed", "--disable-pip-version-check", str(wheel)], home)
    return python


def test_the_wheel_holds_every_module_and_no_link(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    expected = {f"lull/{path.relative_to(ROOT)}" for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert names == expected


def test_the_wheel_holds_the_compiled_part(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if re.fullmatch(r"lull/vmm/_torch_allocator\..*\.so", name)]
    assert not wheel.name.endswith("-none-any.whl")


def test_the_product_is_the_wheels(python: Path, tmp_path: Path) -> None:
    place = run([str(python), "-c", "import lull.cli, lull.vmm; print(lull.cli.__file__, lull.vmm.__file__)"], tmp_path)
    assert str(ROOT) not in place
    assert place.count(str(python.parent.parent)) == 2


def test_the_memory_library_needs_nothing(python: Path, tmp_path: Path) -> None:
    code = "import lull.vmm.pool, lull.vmm.runtime, lull.vmm.control; print('ok')"
    assert run([str(python), "-I", "-S", "-c", f"import sys; sys.path.insert(0, {_site(python)!r}); {code}"], tmp_path)


def _site(python: Path) -> str:
    return str(next(python.parent.parent.glob("lib/python*/site-packages")))


def test_the_demo_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    lull = python.with_name("lull")
    document = json.loads(run([str(lull), "demo", "--json", "--engine-weights", "32MiB"], tmp_path))
    assert document["ok"], document["failures"]
    server = next(process for process in document["processes"] if process["role"] == "server")
    assert server["argv"][0].startswith(str(python.parent.parent))
