"""The package as a whole: floors, lint, what the wheel holds, what the metadata promises."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dsuf

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tool(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_imports_go_down_the_floors_only():
    status, said = tool("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert status == 0, said


def test_ruff_finds_nothing():
    status, said = tool("-m", "ruff", "check", "--no-cache", ".")
    assert status == 0, said


def test_every_file_is_formatted():
    status, said = tool("-m", "ruff", "format", "--check", "--no-cache", ".")
    assert status == 0, said


def test_files_keep_their_size():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "dsuf").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 500} == {}


def test_only_config_reads_the_environment():
    readers = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "dsuf").rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    ]
    assert readers == ["dsuf/config.py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    status, said = tool("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    assert status == 0, said
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_recipes_configs_and_every_module(wheel):
    recipes = {f"dsuf/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    configs = {f"dsuf/configs/{path.name}" for path in (ROOT / "dsuf" / "configs").glob("*.json")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dsuf").rglob("*.py")}
    assert "dsuf/recipes/tetris.toml" in recipes
    assert recipes | configs | modules <= wheel


def test_the_wheel_holds_nothing_else(wheel):
    beside = {name for name in wheel if not name.startswith(("dsuf/", f"dsuf-{dsuf.__version__}.dist-info/"))}
    assert beside == set()
    assert not [name for name in wheel if "/corpus/" in name or name.endswith((".pyc", "train.py"))]


def test_version_and_python_agree_with_the_metadata():
    assert PROJECT["version"] == dsuf.__version__
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert PROJECT["scripts"] == {"dsuf": "dsuf.cli.app:main"}


def test_the_gpu_part_is_installed_on_linux_only_and_torch_never_by_default():
    gpu = [line for line in PROJECT["dependencies"] if line.startswith("numba-cuda")]
    assert [line.partition(";")[2].strip() for line in gpu] == ["sys_platform == 'linux'"]
    assert not [line for line in PROJECT["dependencies"] if line.startswith("torch")]


def test_ci_runs_the_readmes_test_command():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "\npython3 -m venv .venv && .venv/bin/pip install . && .venv/bin/dsuf repro tetris\n" in readme
    tests = "\npython3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest\n"
    assert tests in readme
    assert tests in ci


def test_the_readme_names_every_command():
    from dsuf.cli.app import app, bench

    names = [f"dsuf {command.callback.__name__}" for command in app.registered_commands]
    names += [f"dsuf bench {command.callback.__name__}" for command in bench.registered_commands]
    readme = (ROOT / "README.md").read_text()
    assert [name for name in names if name not in readme] == []


def test_the_readme_names_the_packages_that_ci_installs_for_the_system_tests():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    told = re.search(r"apt-get install --no-install-recommends ([^`]*?)\nln ", readme)[1].replace("\\", "").split()
    assert told == re.search(r'^packages="(.*)"$', ci, re.M)[1].split()
