"""The project itself: what a wheel holds, which pages and examples are true, and the rules of the house."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hatchling.builders.wheel import WheelBuilder

import stretto
from scripts import config_docs
from stretto import cli
from stretto.config import load_config, preset_names
from stretto.config.keys import find
from stretto.history.log import write_rollouts
from stretto.model import FAMILIES
from stretto.trainer import Trainer

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stretto"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
PURE = (
    *("history", "draft", "schedule", "config", "records.py", "alternatives.py", "sampling.py"),
    *("buffer.py", "columns.py", "gate.py", "groups.py", "requests.py", "staleness.py", "view.py"),
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shipped_files() -> set[str]:
    return {
        str(path.relative_to(SOURCE.parent))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


class TestWheel:
    def test_holds_the_package_and_its_data_and_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        packed = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
        assert packed == shipped_files()
        assert {"stretto/py.typed", "stretto/presets/demo.toml"} <= packed
        assert any(entry.startswith("stretto/demo/model/") for entry in packed)

    def test_names_version_licence_command_and_extras(self, wheel: zipfile.ZipFile) -> None:
        (info,) = {entry.split("/")[0] for entry in wheel.namelist() if ".dist-info/" in entry}
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        assert metadata["Name"] == "stretto"
        assert metadata["Version"] == stretto.__version__
        assert metadata["License-Expression"] == "Apache-2.0"
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
        assert "stretto = stretto.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
        extras = set(metadata.get_all("Provides-Extra", []))
        assert {"vllm", "ray", "trl", "math", "gym", "trackers", "dev"} <= extras

    def test_fits_the_size_that_the_demo_model_is_allowed(self, wheel: zipfile.ZipFile) -> None:
        model = [entry for entry in wheel.infolist() if entry.filename.startswith("stretto/demo/model/")]
        assert sum(entry.file_size for entry in model) < 8_000_000


def test_every_dependency_has_a_pin() -> None:
    """What the demo and CI install is known to the last package that we name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub("[-_.]+", "-", line.split("==")[0]).lower() for line in lines if "==" in line}
    names = {re.split(r"[\[<>=;, ]", requirement)[0] for requirement in wanted}
    assert names - {"stretto"} <= pinned


def test_the_oldest_versions_that_are_tested_are_the_oldest_accepted() -> None:
    """But for torch, of which no older build for CPUs is on PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lower = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    lines = (ROOT / "constraints-low.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert lower.keys() == tested.keys()
    assert {
        name: version
        for name, version in tested.items()
        if name != "torch" and re.sub(r"(\.0)+$", "", version) != lower[name]
    } == {}


class TestPages:
    @pytest.mark.parametrize("page", PAGES, ids=name)
    def test_links_lead_somewhere(self, page: Path) -> None:
        links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        local = [link.partition("#")[0] for link in links if not link.startswith(("http", "#"))]
        missing = [link for link in local if not (page.parent / link).exists()]
        assert missing == []

    def test_configuration_page_is_what_the_script_writes(self) -> None:
        assert config_docs.OUT.read_text(encoding="utf-8") == config_docs.render(), "run: make docs"

    @pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
    def test_every_supported_family_is_named(self, page: str) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [family for family in FAMILIES if f"`{family}`" not in text] == []

    def test_every_column_of_the_log_is_described(self, tmp_path: Path) -> None:
        write_rollouts(tmp_path / "empty.parquet", [], step=1)
        columns = set(pq.read_schema(tmp_path / "empty.parquet").names)
        columns |= {"top_ids", "top_logprobs"}  # there where alternatives are kept
        page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8").partition("## Rollouts")[2]
        cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        assert {column for cell in cells for column in re.findall(r"`(\w+)`", cell)} == columns

    def test_commands_and_keys_exist(self) -> None:
        text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
        # The status table names what is not there yet without the program's name.
        commands = set(re.findall(r"(?:^|`)stretto ([a-z]+)", text, re.MULTILINE))
        assert commands <= set(cli.app)
        keys = {key.replace("-", "_") for key in re.findall(r"--([a-z_]+\.[a-z_.-]+[a-z])", text)}
        assert keys
        assert [key for key in keys if find(key) is None] == []

    def test_both_doors_of_the_first_page_configure_the_same_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (code,) = [block for block in blocks if "stretto.train(" in block]
        (words,) = re.findall(r"^stretto (train --model\.path .*)$", text, re.MULTILINE)
        asked: list[Trainer] = []

        def run(trainer: Trainer) -> SimpleNamespace:
            asked.append(trainer)
            return SimpleNamespace(interrupted=False)

        monkeypatch.setattr(Trainer, "run", run)
        monkeypatch.chdir(tmp_path)
        exec(code, {})
        assert cli.run(shlex.split(words)) == 0
        library, command = asked
        assert command.config.reward.functions == [f"{tmp_path / 'reward.py'}:brief"]
        reward = {"reward": library.config.reward}  # the function itself
        assert command.config.model_copy(update=reward) == library.config
        assert re.fullmatch(r"[\d-]+", library.path.name)
        assert re.fullmatch(r"[\d-]+", command.path.name)

    def test_the_walk_names_what_is_there(self) -> None:
        text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
        named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", text)
        assert len(named) > 40
        assert [f"{file}::{path}" for file, path in named if path not in definitions(SOURCE / file)] == []

    def test_make_targets_exist(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
        for target in set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]+)", text, re.MULTILINE)):
            assert re.search(rf"^(\S+ )*{target}( \S+)*:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.toml")), ids=name)
def test_example_configurations_load_and_their_files_are_there(path: Path) -> None:
    config = load_config(path)
    files = [config.data.path, config.eval.path]
    files += [f.rpartition(":")[0] for f in config.reward.functions if ".py:" in f]
    assert [file for file in files if file is not None and not Path(file).is_file()] == []


def test_presets_load() -> None:
    assert "demo" in preset_names()
    for preset in preset_names():
        load_config(preset)


def test_library_example_trains_as_its_configuration_does() -> None:
    """The two doors of examples/own_reward say the same."""
    folder = ROOT / "examples" / "own_reward"
    call = next(
        node
        for node in ast.walk(ast.parse((folder / "train.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stretto.train"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    tree = tomllib.loads((folder / "config.toml").read_text())
    assert ast.literal_eval(given["config"]) == {
        key: value for key, value in tree.items() if key not in ("model", "data", "reward")
    }
    assert ast.literal_eval(given["model"]) == tree["model"]["path"]


class TestHouseRules:
    @pytest.mark.parametrize("module", MODULES, ids=name)
    def test_files_and_functions_are_short(self, module: Path) -> None:
        text = module.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400
        functions = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 60] == []

    @pytest.mark.parametrize(
        "module", [m for m in MODULES if m.relative_to(SOURCE).parts[0] in PURE], ids=name
    )
    def test_pure_logic_imports_no_torch_and_no_clock(self, module: Path) -> None:
        imported = set(imports(ast.parse(module.read_text(encoding="utf-8"))))
        assert imported & {"torch", "transformers", "peft", "ray", "time", "asyncio"} == set()

    def test_help_and_configuration_load_no_torch(self) -> None:
        code = "import sys, stretto, stretto.cli, stretto.config; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_what_is_public_is_listed_before_it_is_loaded(self) -> None:
        code = "import sys, stretto; sys.exit(dir(stretto) != stretto.__all__ or 'torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def definitions(module: Path) -> set[str]:
    """Dotted names of the classes and functions of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{item.name}" for item in inner if isinstance(item, ast.FunctionDef)}
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the packages that a module imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node)


class TestSetUp:
    """`scripts/setup.sh` chooses an interpreter; here they are stand-ins, in a PATH of their own."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        for tool in ("sh", "dirname"):
            found = shutil.which(tool)
            assert found is not None
            (tmp_path / tool).symlink_to(found)
        return tmp_path

    def interpreter(self, folder: Path, command: str, version: tuple[int, int], venv: bool = True) -> None:
        """A Python of this version that says so when it is chosen."""
        script = f"""#!/bin/sh
case "$*" in
    *"sys.exit(not"*) exec {sys.executable} -c "import sys; sys.version_info = {version}; $2" ;;
    *ensurepip*) exit {0 if venv else 1} ;;
    *setup_venv.py*) echo "chosen: {command}" ;;
    *) echo "{version[0]}.{version[1]}" ;;
esac
"""
        (folder / command).write_text(script)
        (folder / command).chmod(0o755)

    def run(self, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(ROOT / "scripts" / "setup.sh"), "core"]
        env = {**os.environ, "PATH": str(path), "PYTHON": "", **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def test_takes_the_newest_that_runs(self, path: Path) -> None:
        (path / "python3.14").write_text("#!/bin/sh\necho 'python3.14: command not found' >&2\nexit 127\n")
        (path / "python3.14").chmod(0o755)
        self.interpreter(path, "python3.13", (3, 13))
        self.interpreter(path, "python3.12", (3, 12))
        assert "chosen: python3.13" in self.run(path).stdout

    def test_passes_over_versions_that_are_not_supported(self, path: Path) -> None:
        self.interpreter(path, "python3", (3, 15))
        result = self.run(path)
        assert result.returncode == 1
        assert "3.11 to 3.14" in result.stderr

    def test_takes_an_older_one_that_can_make_environments(self, path: Path) -> None:
        self.interpreter(path, "python3.13", (3, 13), venv=False)
        self.interpreter(path, "python3.12", (3, 12))
        assert "chosen: python3.12" in self.run(path).stdout

    def test_a_stamp_is_worth_nothing_when_its_interpreter_has_gone(self, tmp_path: Path) -> None:
        if shutil.which("make") is None:
            pytest.skip("needs make")
        for file in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
            shutil.copy(file, tmp_path)
        shutil.copytree(ROOT / "scripts", tmp_path / "scripts")

        def would_do(venv: str) -> str:
            command = ["make", "--dry-run", "--no-print-directory", f"{venv}/.core"]
            return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

        for venv, kind in ((".venv", "core"), (".venv-ray", "ray")):
            (tmp_path / venv / "bin").mkdir(parents=True)
            (tmp_path / venv / ".core").touch()
            assert f"scripts/setup.sh {kind}" in would_do(venv)
            (tmp_path / venv / "bin" / "python").symlink_to(sys.executable)
            assert "setup.sh" not in would_do(venv)

    @pytest.mark.parametrize(
        ("kind", "pretence", "said"),
        [
            ("vllm", "sys.platform = 'darwin'", "for Linux only"),
            ("low", "sys.version_info = (3, 13, 0)", "Python 3.11 and 3.12"),  # later ones have no wheels
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_is_installed(
        self, kind: str, pretence: str, said: str, tmp_path: Path
    ) -> None:
        script = ROOT / "scripts" / "setup_venv.py"
        code = (
            f"import json, runpy, shutil, subprocess, sys, tempfile; {pretence}; "
            f"sys.argv = ['setup_venv.py', {kind!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_names_the_package_that_is_missing(self, path: Path) -> None:
        self.interpreter(path, "python3.12", (3, 12), venv=False)
        result = self.run(path)
        assert result.returncode == 1
        assert "apt install python3.12-venv" in result.stderr

    def test_uses_the_one_that_is_named_or_none(self, path: Path) -> None:
        self.interpreter(path, "python3.13", (3, 13))
        self.interpreter(path, "python3.11", (3, 11))
        assert "chosen: python3.11" in self.run(path, PYTHON="python3.11").stdout
        result = self.run(path, PYTHON="python3.9")
        assert result.returncode == 1
        assert "PYTHON=python3.9" in result.stderr
