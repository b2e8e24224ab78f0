"""What the pages promise: links lead somewhere, tables equal their results, sentences are short."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bench import make_tables

from openspec.bench.bench_config import BenchConfig
from openspec.config import engine_group, parse_engine_args
from openspec.serve.config import ServeConfig
from openspec.serve.server.app import PUBLIC_PATHS, ROUTES
from openspec.settings.command_line import parse_command_line
from openspec.settings.setting import build, group_of
from openspec.tools.doctor import DoctorConfig
from tests import prose

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("csrc", "python", "tests", "bench", "docs", "third_party")
PAGES = sorted({*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))})
METHODS = sorted(path.stem for path in ROOT.glob("csrc/runtime/drafting/methods/*.cpp"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code_blocks(page: Path) -> str:
    return re.sub(r"^ *(```+).*?^ *\1$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub names headings: lower case, hyphens for spaces, no other punctuation."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", without_code_blocks(page), flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(name == slug or name.startswith(f"{slug}-") for name in found)
        found.add(f"{slug}-{number}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    text = without_code_blocks(page)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(
        r'(?:src|href)="([^"]+)"', text
    )
    dead = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead, f"{relative(page)} links to what is not there: {', '.join(dead)}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != DOCS / "notes"], ids=relative
)
def test_paths_in_prose_exist(page: Path) -> None:
    """Paths of the tree in backticks; placeholders and patterns are no paths, notes are records."""
    missing = [
        path
        for path in re.findall(
            r"`((?:csrc|python|tests|bench|docs|third_party|\.ci)/[^`\s]*)`",
            without_code_blocks(page),
        )
        if not re.search(r"[<>*{}$…]|\.\.\.", path) and not (ROOT / path.split(":")[0]).exists()
    ]
    assert not missing, f"{relative(page)} names what is not there: {', '.join(missing)}"


@pytest.mark.parametrize("index", ["docs/index.md", "docs/notes/README.md"])
def test_index_lists_every_page(index: str) -> None:
    page = ROOT / index
    linked = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
    listed = {(page.parent / target).resolve() for target in linked}
    pages = set(page.parent.rglob("*.md")) - {page}
    if page.parent == DOCS:
        pages = {path for path in pages if path.parent != DOCS / "notes"}
    assert not pages - listed, f"not in {index}: {sorted(map(relative, pages - listed))}"


def test_notes_are_dated() -> None:
    wrong = [
        path.name
        for path in (DOCS / "notes").iterdir()
        if path.name != "README.md" and not re.match(r"20\d\d-\d\d-\d\d-[a-z0-9-]+\.md$", path.name)
    ]
    assert not wrong


@pytest.mark.parametrize("method", METHODS)
def test_method_has_a_page(method: str) -> None:
    assert (DOCS / "methods" / f"{method}.md").is_file()


def test_tables_equal_their_results() -> None:
    assert not make_tables.stale(), "run python -m bench.make_tables"


def test_a_changed_result_makes_a_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    load = make_tables.load

    def doubled(name: str) -> dict:
        document = load(name)
        for run in document.get("runs", []):
            run["speedup"] = 2 * run.get("speedup", 1.0)
        return document

    monkeypatch.setattr(make_tables, "load", doubled)
    assert "docs/images/speedup.svg" in make_tables.stale()


def test_sentences() -> None:
    text = """# A heading. With a stop.

The first one; it goes on: `a.b()` is *code*. See [the page](x.md)! Version 3.10 ends
no sentence.

- an item without an end
  that goes on
- another

A paragraph:

    code. code.

| a. | b. |
|---|---|

```console
$ run. this.
```

<!-- table: x -->
Last
"""
    assert prose.sentences(text) == [
        "The first one; it goes on: code is code",
        "See the page",
        "Version 3.10 ends no sentence",
        "an item without an end that goes on",
        "another",
        "A paragraph:",
        "Last",
    ]
    assert prose.mean_words("One two three. Four five? Six!") == 2
    assert prose.too_long("word " * 40 + ".") == []
    assert len(prose.too_long("word; " * 41 + ".")) == 1


@pytest.mark.parametrize("page", prose.pages(), ids=relative)
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    assert not prose.too_long(text)
    assert prose.mean_words(text) <= prose.MEAN_WORDS


@pytest.mark.parametrize(
    ("page", "most"),
    [(DOCS / "performance.md", 120), *((page, 80) for page in (DOCS / "methods").glob("*.md"))],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_pages_stay_short(page: Path, most: int) -> None:
    assert len(page.read_text().splitlines()) <= most


def test_the_kubernetes_example(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (DOCS / "scale.md").read_text(), flags=re.S)
    service, deployment = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "openspec.serve"]
    [volume] = container["volumeMounts"]
    (tmp_path / "qwen3-4b").mkdir()
    args = [arg.replace(volume["mountPath"], str(tmp_path)) for arg in container["args"]]
    groups = [group_of("server", ServeConfig)]
    engine, values = parse_engine_args("test", "", args, groups, environ={})
    server = build(ServeConfig, values)
    assert Path(str(engine.model)) == tmp_path / "qwen3-4b"
    assert server.port == container["ports"][0]["containerPort"]
    assert server.replicas is not None
    num_gpus = server.replicas * engine.tensor_parallel_size
    assert num_gpus == container["resources"]["limits"]["nvidia.com/gpu"]
    longest_end_s = server.drain_grace_s + server.shutdown_timeout
    assert pod["spec"]["terminationGracePeriodSeconds"] > longest_end_s
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in PUBLIC_PATHS & ROUTES.keys()


def test_the_tests_that_a_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (DOCS / "internals" / "trust.md").read_text())
    assert len(named) > 40
    for file, test in named:
        sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {test}(" in source for source in sources), f"{file}::{test}"


def test_the_images_start_the_server_and_take_the_sources_they_need() -> None:
    """What a linter cannot see: the module, the versions that are tested, what is left out."""
    text = (ROOT / "Dockerfile").read_text()
    entries = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    for entry in entries:
        command = json.loads(entry)
        assert command[:3] == ["python", "-m", "openspec.serve"]
        parse_engine_args("test", "", command[3:], [group_of("server", ServeConfig)], environ={})
    assert len(entries) == len(re.findall(r"^FROM \S+ AS (?:cpu|cuda)$", text, re.M)) == 2
    tested = [
        re.findall(r"torch==([\d.]+)", (ROOT / file).read_text())[0]
        for file in ("tests/run", ".ci/run")
    ]
    assert re.findall(r"^ARG TORCH=(.*)$", text, re.M) == tested
    ignored = (ROOT / ".dockerignore").read_text().split()
    kept = {"csrc", "python", "third_party", "CMakeLists.txt", "pyproject.toml", "README.md"}
    assert not kept & {*ignored} and {".git", "build", "**/*.so"} <= {*ignored}


def test_nobody_is_told_to_install_another_projects_package() -> None:
    """The name on PyPI is another project's; extras come from the checkout."""
    pattern = r"pip3? install (-[^ ]+ )*[\"']?openspec([]\"' [`]|$)"
    git = ["git", "grep", "-nE", pattern, "--", ":!docs/notes", ":!tests/unit/test_docs.py"]
    told = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    wrong = [line for line in told.splitlines() if not re.search("[Nn]ever|Do not", line)]
    assert not wrong
    for page in ("README.md", "docs/quickstart.md", "docs/scale.md"):
        assert "another project's" in (ROOT / page).read_text()


PROGRAMS = sorted(
    {
        name
        for page in [*DOCS.glob("*.md"), ROOT / "README.md"]
        for name in re.findall(r"python -m (bench\.[a-z_]+)", page.read_text())
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_what_it_needs(program: str) -> None:
    """After the README's install alone, without the tools of developers."""
    absent = ("httpx", "jsonschema", "hypothesis", "openai", "pytest", "transformers", "zmq")
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent})); "
        f"sys.argv = [{program!r}, '--help']; runpy.run_module({program!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2) or re.search(r"needs (\w+): pip install \1", done.stderr)


def command_lines(page: Path) -> list[tuple[str, list[str]]]:
    """(command, arguments) of the page's shell blocks, with lines joined as a shell would."""
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```$", page.read_text(), re.M | re.S)
    text = re.sub(r"\\\n\s*", " ", "".join(blocks))
    text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)
    found = re.findall(r"python -m openspec\.(serve|bench|doctor)\b(.*)", text)
    return [(command, shlex.split(rest, comments=True)) for command, rest in found]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent != DOCS / "notes" and command_lines(page)],
    ids=relative,
)
def test_command_lines_have_the_flags_that_there_are(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server.yaml").touch()  # which a page writes about
    own = {"serve": ServeConfig, "bench": BenchConfig, "doctor": DoctorConfig}
    for command, arguments in command_lines(page):
        groups = [group_of(command, own[command]), engine_group()]
        parse_command_line(groups, command, "", arguments, environ={})


def test_command_lines_are_found() -> None:
    counts = [len(command_lines(DOCS / name)) for name in ("your_model.md", "serving.md")]
    assert min(counts) >= 4
