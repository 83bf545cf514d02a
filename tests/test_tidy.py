"""The house rules that no linter checks. Each failure names file and line."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.agents.protocol.loans import LoanState

ROOT = Path(__file__).parent.parent
PRODUCT = ("agents", "api", "bench", "cli", "migrations", "scheduler", "vmm")
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
BANNED_NAMES = re.compile(r"utils?|commons?|managers?|helpers?|misc")
# They take `now` as an argument; what they may not import at all, import-linter checks too.
PURE_MODULES = (
    "scheduler/decide.py",
    "scheduler/placement.py",
    "scheduler/explain.py",
    "scheduler/usage.py",
    "scheduler/lifecycle.py",
    "agents/protocol/loans.py",
    "vmm/lifecycle.py",
    "vmm/ranks_protocol.py",
    "bench/loan_parts.py",
    "cli/quantities.py",
    "cli/terminal.py",
)
IMPURE_IMPORTS = frozenset({"asyncio", "os", "random", "secrets", "socket", "subprocess", "threading", "time"})
CLOCK_CALLS = frozenset({"now", "utcnow", "today"})


def product_files() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_every_folder_with_code_is_packaged() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"lull." + ".".join(path.parent.relative_to(ROOT).parts) for path in product_files()}
    assert found == listed


def test_every_package_is_typed() -> None:
    folders = {path.parent for path in product_files()}
    assert [folder for folder in sorted(folders) if not (folder / "py.typed").exists()] == []


@pytest.mark.parametrize("name", PRODUCT)
def test_type_checkers_find_the_folder(name: str) -> None:
    assert (ROOT / "typings" / "lull" / name).resolve() == ROOT / name


def test_links_for_type_checkers_are_no_more_than_the_packages() -> None:
    assert {path.name for path in (ROOT / "typings" / "lull").iterdir()} == set(PRODUCT)


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in product_files()
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    }
    assert long == {}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    long = {
        f"{place(path, function)} {function.name}": lines
        for path in product_files()
        if path.parent.name != "versions"  # a migration is one long list, and is never changed again
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_no_catch_all_names() -> None:
    named = [path for path in product_files() if any(map(BANNED_NAMES.fullmatch, (path.stem, path.parent.name)))]
    assert named == []


def test_modules_postpone_annotations() -> None:
    lacking = [
        str(path.relative_to(ROOT))
        for path in (*product_files(), *files_of_tests())
        if path.read_text().strip() and "from __future__ import annotations" not in path.read_text()
    ]
    assert lacking == []


def imports(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    """Every import: the node, how many dots, and the module's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node, node.level, node.module or ""


def test_product_code_imports_product_code_relatively() -> None:
    absolute = [
        f"{place(path, node)} {name}"
        for path in product_files()
        if "migrations" not in path.parts  # alembic loads these by path
        for node, level, name in imports(parsed(path))
        if level == 0 and name.partition(".")[0] in {"lull", *PRODUCT}
    ]
    assert absolute == []


def test_one_file_knows_cuda_python() -> None:
    knowing = [path for path in product_files() if re.search(r"\bcuda\.(bindings|core)\b", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in knowing] == ["vmm/cuda_calls.py"]


def test_tests_import_the_installed_product() -> None:
    by_folder = [
        f"{place(path, node)} {name}"
        for path in files_of_tests()
        for node, level, name in imports(parsed(path))
        if level == 0 and name.partition(".")[0] in PRODUCT
    ]
    assert by_folder == []


def test_pure_modules_know_no_clock_and_no_outside_world() -> None:
    impure: list[str] = []
    for name in PURE_MODULES:
        path = ROOT / name
        tree = parsed(path)
        impure += [f"{place(path, node)} {module}" for node, _, module in imports(tree) if module in IMPURE_IMPORTS]
        impure += [
            f"{place(path, node)} {node.func.attr}()"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK_CALLS
        ]
    assert impure == []


def test_tests_wait_for_events_and_not_for_time() -> None:
    sleeping = [
        place(path, node)
        for path in files_of_tests()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert sleeping == []


def test_no_error_is_swallowed_whole() -> None:
    swallowed = [
        place(path, node)
        for path in product_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler)
        and all(isinstance(statement, ast.Pass) for statement in node.body)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
    ]
    assert swallowed == []


def test_nothing_is_left_to_be_done() -> None:
    left = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if left.search(line)
    ]
    assert found == []


def test_the_documented_loan_states_are_those_of_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = text.partition("<!-- loan states -->")
    section, mark, _ = rest.partition("<!-- end of loan states -->")
    assert mark, "docs/architecture.md: the marks around the loan states are gone"
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert documented == [state.value for state in LoanState]


def test_the_documented_exit_codes_are_those_of_the_command_line() -> None:
    from lull.cli.exits import ExitCode

    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = text.partition("<!-- exit codes -->")
    section, _, _ = rest.partition("<!-- end of exit codes -->")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert documented == {code.value for code in ExitCode}


def test_only_listed_files_may_skip() -> None:
    lines = (ROOT / "tests" / "skips.txt").read_text().splitlines()
    listed = {line.split(":", 1)[0] for line in lines if line and not line.startswith("#")}
    word = re.compile(r"\bpytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b")
    skipping = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if path.name != "test_tidy.py" and word.search(path.read_text())
    }
    assert skipping == listed
