"""Rules of the repository, as tests."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fusepass
from fusepass.options import OPTIONS
from fusepass.verdict import Reason

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusepass"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The stages in order. A module imports from rows above its own only; a new module gets its place here.
STAGES = (
    "errors",
    "verdict",
    "row_ops",
    "row_program",
    "_torch_compat",
    "options",
    "kernels",
    "provenance",
    "graph_pass",
    "rules",
    "lift",
    "lookups",
    "moves",
    "regions",
    "region_program",
    "patterns.layer_norm",
    "patterns.rms_norm",
    "patterns",
    "recognise",
    "recognise_backward",
    "residual",
    "cost",
    "plan",
    "merge",
    "joint_pass",
    "validate",
    "lower",
    "rewrite",
    "report",
    "fuse_pass",
    "backend",
    "",
    "environment",
    "demo",
    "__main__",
)
# Within kernels/, which as a whole may import the row program and what stands above it.
KERNEL_STAGES = (
    "kernels.reference",
    "kernels.column_sums",
    "kernels.schedule",
    "kernels.triton_writer",
    "kernels.triton_loop",
    "kernels.triton_sums",
    "kernels.triton_code",
    "kernels.autotune",
    "kernels.triton_launch",
    "kernels.traffic",
    "kernels.cpp_shift",
    "kernels.cpp_placement",
    "kernels.cpp_statements",
    "kernels.cpp_code",
    "kernels.cpp_build",
    "kernels.ops",
    "kernels.wrapper_call",
    "kernels.audit",
    "kernels.source",
    "kernels",
)
KERNELS_MAY_IMPORT = {"errors", "row_ops", "row_program", "_torch_compat", "options"}
ORDER = {
    name: position
    for position, name in enumerate(n for s in STAGES for n in (KERNEL_STAGES if s == "kernels" else (s,)))
}

CLIS = {"__main__", "demo"}


def module_name(path: Path) -> str:
    """`fusepass/patterns/rms_norm.py` is "patterns.rms_norm", `fusepass/__init__.py` is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, relative names made absolute."""
    path = MODULES[name]
    package = ["fusepass", *name.split(".")] if name else ["fusepass"]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def own_imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and name of the modules of this package that a module imports."""
    for line, imported in imports(name):
        if imported.split(".")[0] == "fusepass":
            inner = imported.removeprefix("fusepass").removeprefix(".")
            yield line, inner if inner in MODULES else inner.rpartition(".")[0]


def test_every_module_has_its_place() -> None:
    assert set(MODULES) == set(ORDER), "put a new module into STAGES or KERNEL_STAGES; take a removed one out"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_backwards(name: str) -> None:
    forwards = [f"{name}:{line} imports {i}" for line, i in own_imports(name) if ORDER[i] >= ORDER[name]]
    assert not forwards


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("kernels.")])
def test_kernels_know_nothing_of_graphs(name: str) -> None:
    allowed = KERNELS_MAY_IMPORT | set(KERNEL_STAGES)
    assert not [f"{name}:{line} imports {i}" for line, i in own_imports(name) if i not in allowed]


@pytest.mark.parametrize("name", [n for n in MODULES if n != "_torch_compat"])
def test_private_torch_is_imported_in_one_place(name: str) -> None:
    private = re.compile(r"torch(\.\w+)*\._[a-zA-Z]")
    assert not [f"{name}:{line} imports {i}" for line, i in imports(name) if private.match(i)]


@pytest.mark.parametrize("name", [n for n in MODULES if n not in CLIS])
def test_only_command_lines_print(name: str) -> None:
    calls = [n for n in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def test_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert PROJECT["version"] == fusepass.__version__ == newest[1]


def test_options_in_the_readme_are_those_of_the_table() -> None:
    rows = re.findall(
        r"^\| `(fusepass\.\w+)` \| `(\w+)` \| `(.*?)` \| (.*?) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert rows == [(o.full_name, o.variable, repr(o.default), o.meaning) for o in OPTIONS]


def test_environment_variables_are_those_of_the_table() -> None:
    known = {o.variable for o in OPTIONS}
    files = [*MODULES.values(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {v for f in files for v in re.findall(r"\bFUSEPASS_[A-Z_]*[A-Z]\b", f.read_text())}
    assert named == known & named
    assert named, "the README names none"


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    return [Requirement(r) for r in (*PROJECT["dependencies"], *(r for e in extras for r in optional[e]))]


def test_constraints_pin_what_is_installed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    wanted = [r for r in requirements("test", "bench", "models", "dev") if r.name != "fusepass"]
    unpinned = [r.name for r in wanted if canonicalize_name(r.name) not in pins]
    assert not unpinned
    assert all(pins[canonicalize_name(r.name)] in r.specifier for r in wanted)


def test_core_dependencies_are_few() -> None:
    assert {r.name for r in requirements()} == {"torch", "triton", "sympy", "tabulate"}


def test_readme_states_the_supported_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert str(next(r.specifier for r in requirements() if r.name == "torch")) == "<2.16,>=2.11"
    assert "Python 3.11 to 3.13" in readme
    assert "torch 2.11 to 2.15" in readme


def text_files() -> list[Path]:
    """Tracked files, and untracked ones that are not ignored; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [ROOT / name for name in listed]
    except (OSError, subprocess.CalledProcessError):
        folders = (ROOT / name for name in ("fusepass", "bench", "tests", ".ci"))
        paths = [*ROOT.glob("*.*"), ROOT / "Makefile", *(p for folder in folders for p in folder.rglob("*"))]
    return [p for p in paths if p.is_file() and p.suffix not in (".png", ".pyc")]


def test_no_path_of_a_machine() -> None:
    files = text_files()
    assert PACKAGE / "__init__.py" in files
    here = re.escape(f"{ROOT}/") if len(ROOT.parts) > 2 else "$^"
    pattern = re.compile(rf"/(tmp|opt|root|home)/[a-z]|{here}")
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in files for m in pattern.finditer(p.read_text())]
    assert not found


def test_no_module_is_called_helper() -> None:
    vague = re.compile(r"utils?|helpers?|misc|common|manager")
    assert not [p.name for p in text_files() if p.suffix == ".py" and vague.fullmatch(p.stem)]


def test_the_readme_explains_every_reason() -> None:
    text = (ROOT / "README.md").read_text()
    assert [r.name for r in Reason if f"`{r.name}`" not in text] == []
