"""Rules of the source tree that no compiler checks: layers, method names, forbidden calls."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import openspec

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "openspec"

# ---- Layers: each may use itself and the ones before it -----------------------------------------

CPP_LAYERS = ("core", "kernels", "model", "grammar", "runtime", "bind")

# What a family of kernels may use besides core, common and its own folder; only families above it.
KERNEL_FAMILIES: dict[str, tuple[str, ...]] = {
    "common": (),
    "choose": (),
    "exchange": (),
    "linear": ("exchange",),  # where sums are sent
    "experts": ("linear",),
    "attention": ("linear",),  # the CPU's tile of sums
    "norm": ("exchange",),  # where sums are taken
    "delta_net": (),
    "rope": ("attention",),  # the CPU's largest head
    # Parameters of sampling; what a step counted; which blocks of a state are folded.
    "steps": ("choose", "delta_net", "exchange"),
    "drafts": ("choose", "linear", "steps"),
}

# The rooms of the package, lowest first, and what each may import, for types as well. A room is a
# folder or a module at the root.
PYTHON_ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "child_process": ("errors",),
    "settings": ("errors",),
    "step_detail": (),
    "messages": ("errors", "step_detail"),
    "specs": (),
    "_C": ("messages", "specs"),
    "_grammar": (),
    "ops": ("_C",),
    "records": ("errors",),
    "checkpoint": ("_C", "errors", "specs"),
    "grammar": ("_grammar", "errors", "child_process", "checkpoint"),
    "drafters": ("_C", "errors", "settings", "checkpoint", "specs"),
    "config": ("errors", "settings", "checkpoint", "drafters"),
    "text": ("errors", "child_process", "step_detail", "messages", "checkpoint", "grammar"),
    "engine": (
        "_C",
        "errors",
        "child_process",
        "step_detail",
        "settings",
        "messages",
        "specs",
        "checkpoint",
        "drafters",
        "config",
    ),
    "llm": (
        *("_C", "errors", "settings", "messages", "checkpoint", "grammar", "config", "text"),
        "engine",
    ),
    "adapt": (
        *("_C", "errors", "settings", "messages", "specs", "checkpoint", "drafters", "config"),
        *("engine", "llm", "records"),
    ),
    "serve": (
        "records",
        "grammar",
        "errors",
        "step_detail",
        "settings",
        "messages",
        "checkpoint",
        "config",
        "text",
        "engine",
    ),
    "bench": ("errors", "settings", "messages", "drafters", "config"),
    "tools": (
        *("_C", "errors", "settings", "messages", "checkpoint", "drafters", "config", "engine"),
        *("llm", "bench"),
    ),
    "demo": ("bench", "tools"),
    "doctor": ("tools",),
    "convert_drafter": ("tools",),
    "quantize": ("tools",),
    "__main__": (),
}
MAX_ROOT_MODULES = 11

# Wings with sub-folders: their rooms, lowest first, and what each may use of the same wing.
CPP_SUB_ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "weights": (),
        "parts": ("weights",),
        "targets": ("weights", "parts"),
        "heads": ("weights", "parts", "targets"),  # the target that a head reads
    },
    "runtime": {
        "state": (),
        "drafting": ("state",),
        "step": ("state", "drafting"),
        "device": ("state", "drafting", "step"),
        "runner": ("state", "drafting", "step", "device"),
    },
}
PYTHON_SUB_ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "checkpoint": {
        "strict_json": (),
        "float16": (),
        "folder": (),
        "tensor_info": ("strict_json",),
        "quantization": ("strict_json", "float16", "folder", "tensor_info"),
        "dummy": ("quantization",),
        "weights": (*("strict_json", "dummy", "float16", "folder", "tensor_info", "quantization"),),
        "targets": ("strict_json", "folder", "quantization"),
        "other_head": ("weights",),
        "draft_model": ("strict_json", "float16", "folder", "tensor_info", "weights"),
        "token_map": ("draft_model",),
        "vocabularies": ("strict_json", "folder", "draft_model"),
        "draft_head": (
            *("strict_json", "quantization", "weights", "targets", "draft_model", "token_map"),
        ),
    },
    "drafters": {
        "spec": (),
        "none": ("spec",),
        "ngram": ("spec",),
        "mtp": ("spec",),
        "dflash": ("spec",),
        "draft_model": ("spec",),
        "eagle3": ("spec",),
    },
    "adapt": {
        "heads": (),
        "texts": (),
        "target": ("heads",),
        "start": ("heads",),
        "replay": ("heads", "texts"),
        "scoring": ("heads", "texts", "target"),
        "decide": ("texts", "scoring"),
        "loop": ("heads",),
        "train": ("heads", "texts", "target", "start", "replay", "scoring", "loop"),
        "states": ("target", "replay"),
        "cycle": (*("heads", "texts", "target", "start", "replay", "scoring", "decide", "loop"),),
        "__main__": ("train", "states", "cycle"),
    },
    "grammar": {
        "patterns": (),
        "schemas": ("patterns",),
        "json_text": ("schemas",),
        "lark": ("patterns",),
        "formats": ("lark", "patterns", "schemas"),
        "tags": ("schemas", "formats"),
        "rules": ("patterns", "schemas", "formats"),
        "lanes": (),
        "worker": ("lanes",),
        "compiled": ("formats", "lark", "rules", "worker"),
        "compiler": ("lanes", "worker"),
    },
    "engine": {
        "memory": (),
        "devices": (),
        "core": (),
        "start_phases": (),
        "plan": ("memory", "devices", "start_phases"),
        "load": ("memory", "devices", "plan", "core", "start_phases"),
        "processes": ("devices", "core", "load", "start_phases"),
    },
    "serve": {
        "config": (),
        "shapes": (),
        "generation": ("config", "shapes"),
        "endpoints": ("config", "shapes", "generation"),
        "server": ("config", "shapes", "generation", "endpoints"),
        "ray_metrics": ("generation",),
        "ray_app": ("config", "generation", "server", "ray_metrics"),
        "__main__": ("config", "server"),
    },
}


def cpp_files(*layers: str) -> list[Path]:
    return sorted(
        path
        for layer in layers
        for path in (CSRC / layer).rglob("*")
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
    )


def python_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".pyi"})


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def includes(path: Path) -> Iterator[tuple[bool, str]]:
    """(is quoted, what is included) of a C++ file."""
    for match in re.finditer(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.M):
        yield match[1] == '"', match[2]


def test_cpp_includes_point_one_way() -> None:
    wrong = []
    for layer in CPP_LAYERS:
        allowed = CPP_LAYERS[: CPP_LAYERS.index(layer) + 1]
        for path in cpp_files(layer):
            for is_quoted, name in includes(path):
                if is_quoted and name.split("/")[0] not in allowed:
                    wrong.append(f'{relative(path)}: "{name}" is not of {", ".join(allowed)}')
    assert not wrong, "\n".join(wrong)


def test_kernel_families_use_what_they_name() -> None:
    """Files beside the folders know all families: ops.h, isa_cpu.h and dispatch_cpu.cpp."""
    kernels = CSRC / "kernels"
    families = {path.name for path in kernels.iterdir() if path.is_dir()}
    assert families == set(KERNEL_FAMILIES)
    wrong = []
    for place, (family, others) in enumerate(KERNEL_FAMILIES.items()):
        assert set(others) <= set(list(KERNEL_FAMILIES)[:place]), family
        allowed = {"common", family, *others}
        for path in cpp_files(f"kernels/{family}"):
            for is_quoted, name in includes(path):
                parts = name.split("/")
                is_table = name == "kernels/isa_cpu.h" and path.name.endswith("_cpu.cpp")
                if is_quoted and parts[0] == "kernels" and not is_table and parts[1] not in allowed:
                    wrong.append(f'{relative(path)}: "{name}" is not of {", ".join(allowed)}')
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wing", CPP_SUB_ROOMS)
def test_cpp_sub_rooms_use_what_they_name(wing: str) -> None:
    rooms = CPP_SUB_ROOMS[wing]
    assert_lowest_first(rooms)
    wrong = []
    for path in cpp_files(wing):
        room = cpp_room(relative(path).removeprefix("csrc/"), wing)
        assert room in rooms, f"{relative(path)}: CPP_SUB_ROOMS places a new folder"
        for is_quoted, name in includes(path):
            if is_quoted and name.startswith(f"{wing}/"):
                other = cpp_room(name, wing)
                if other != room and other not in rooms[room]:
                    wrong.append(f'{relative(path)}: "{name}" is not for {room}')
    assert not wrong, "\n".join(wrong)


def cpp_room(name: str, wing: str) -> str:
    """The sub-folder of a file of the wing; files beside the folders are of the last room."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 else list(CPP_SUB_ROOMS[wing])[-1]


def assert_lowest_first(rooms: dict[str, tuple[str, ...]]) -> None:
    for place, (room, others) in enumerate(rooms.items()):
        assert set(others) <= set(list(rooms)[:place]), room


def test_core_includes_only_the_standard_library() -> None:
    wrong = [
        f"{relative(path)}: <{name}>"
        for path in cpp_files("core")
        for is_quoted, name in includes(path)
        if not is_quoted and not re.fullmatch(r"[a-z_0-9]+|immintrin\.h", name)
    ]
    assert not wrong, "\n".join(wrong)


def test_grammar_stands_on_core_and_hides_the_library() -> None:
    wrong = []
    for layer in CPP_LAYERS:
        for path in cpp_files(layer):
            for is_quoted, name in includes(path):
                if layer == "grammar" and is_quoted and name.split("/")[0] not in ("core", layer):
                    wrong.append(f'{relative(path)}: "{name}" is not of core')
                if layer != "grammar" and re.match(r"(xgrammar|dlpack|support)/", name):
                    wrong.append(f"{relative(path)}: <{name}> is for csrc/grammar alone")
                if layer != "grammar" and name.endswith("_library.h"):
                    wrong.append(f'{relative(path)}: "{name}" is for csrc/grammar alone')
    assert not wrong, "\n".join(wrong)


def test_torch_and_python_stay_in_bind() -> None:
    wrong = [
        f"{relative(path)}: {name}"
        for path in cpp_files("core", "kernels", "model", "grammar", "runtime")
        for _, name in includes(path)
        if re.match(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h", name)
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_includes_torch_extension() -> None:
    """It costs 38 s per file; torch/library.h and the ATen headers by name cost 5 s."""
    wrong = [
        f"{relative(path)}: {name}"
        for path in cpp_files("bind")
        for _, name in includes(path)
        if name in {"torch/extension.h", "torch/all.h", "torch/torch.h", "ATen/ATen.h"}
    ]
    assert not wrong, "\n".join(wrong)


def module_paths() -> dict[str, Path]:
    """Files by dotted name; that of a package is its `__init__.py`."""
    return {
        ".".join(("openspec", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in python_files()
    }


MODULES = module_paths()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also below `if TYPE_CHECKING:`."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in MODULES:  # what a module defines belongs to it
                name = name.rpartition(".")[0]
            if name:
                found.add(name)
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_python_rooms_use_what_they_name() -> None:
    rooms = {room_of(module) for module in MODULES if module != "openspec"}
    assert rooms == set(PYTHON_ROOMS), "PYTHON_ROOMS places a new module or folder"
    wrong = []
    assert_lowest_first(PYTHON_ROOMS)
    for name, path in MODULES.items():
        if name == "openspec":
            continue  # the package's face shows names of every room
        for module in imported_modules(path) - {"openspec"}:  # for its version
            room, other = room_of(name), room_of(module)
            if other != room and other not in PYTHON_ROOMS[room]:
                wrong.append(f"{relative(path)} imports {module}, which {room} may not use")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wing", PYTHON_SUB_ROOMS)
def test_python_sub_rooms_use_what_they_name(wing: str) -> None:
    """A wing's `__init__` is left out: it may be its face."""
    rooms = PYTHON_SUB_ROOMS[wing]
    assert_lowest_first(rooms)
    prefix = f"openspec.{wing}."
    modules = {name: path for name, path in MODULES.items() if name.startswith(prefix)}
    assert {name.removeprefix(prefix).split(".")[0] for name in modules} == set(rooms)
    wrong = []
    for name, path in modules.items():
        room = name.removeprefix(prefix).split(".")[0]
        for module in imported_modules(path):
            other = module.removeprefix(prefix).split(".")[0]
            if module.startswith(prefix) and other != room and other not in rooms[room]:
                wrong.append(f"{relative(path)} imports {module}, which {room} may not use")
    assert not wrong, "\n".join(wrong)


def test_python_imports_have_no_circle() -> None:
    """`openspec` is left out: others take its version, and its names load on first use."""
    imports = {
        name: imported_modules(path) - {"openspec", name}
        for name, path in MODULES.items()
        if name != "openspec"
    }
    while True:
        free = {name for name, others in imports.items() if not others}
        if not free:
            break
        imports = {name: others - free for name, others in imports.items() if name not in free}
    assert not imports, f"these import each other, or those that do: {sorted(imports)}"


def test_names_of_the_package_have_homes() -> None:
    """They load on first use, so a module that moved would show there only."""
    assert set(openspec._HOMES) == set(openspec.__all__)
    assert {f"openspec.{home}" for home in openspec._HOMES.values()} <= set(MODULES)


def test_few_modules_at_the_root() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MAX_ROOT_MODULES, sorted(modules)


# ---- A method's name appears only in its own files ----------------------------------------------

PLAIN = "none"  # plain decoding: not a method, and an English word
LIKE_A_SETTING = "draft_model"  # as --draft-model, which every method with a head has
DRAFTERS = PACKAGE / "drafters"
CPP_METHODS = CSRC / "runtime" / "drafting" / "methods"


def methods() -> dict[str, set[str]]:
    """Methods, and of each the names that its files may say: methods in one folder share theirs."""
    families = [
        {path.stem for path in folder.glob("*.py") if not path.stem.endswith("_format")}
        for folder in DRAFTERS.iterdir()
        if folder.is_dir()
    ]
    families += [{path.stem} for path in DRAFTERS.glob("*.py") if path.stem != "spec"]
    found = {name: family - {"__init__"} for family in families for name in family}
    missing = {path.stem for path in CPP_METHODS.glob("*.cpp")} - set(found)
    assert not missing, f"without a module in drafters: {missing}"
    others = {"__init__", "__pycache__", PLAIN, LIKE_A_SETTING}
    return {name: found[name] for name in sorted(set(found) - others)}


def name_pattern(method: str) -> re.Pattern[str]:
    """The name as written in code and prose: ngram, n_gram, n-gram, NGRAM, Ngram, NgramDrafter."""
    letters = "[-_]?".join(re.escape(c) for c in method.replace("_", ""))
    camel_case = "".join(part.capitalize() for part in method.split("_"))
    return re.compile(rf"(?<![A-Za-z])(?i:{letters})|{camel_case}")


def test_name_pattern() -> None:
    pattern = name_pattern("ngram")
    for text in (
        "ngram",
        "n-gram",
        "n_gram_min",
        "NGRAM",
        "NgramDrafter",
        "makeNgram",
        "ngram_lookup",
    ):
        assert pattern.search(text), text
    for text in ("json_grammar", "engram", "in gram"):
        assert not pattern.search(text), text
    assert name_pattern("eagle3").search("an EAGLE-3 head")


@pytest.mark.parametrize("method", methods())
def test_method_name_only_in_its_own_files(method: str) -> None:
    family = methods()[method]
    own = {PACKAGE / "ops.py", DRAFTERS / f"{method}.py"}  # ops.py binds the op of the same name
    for name in family:
        own |= set((DRAFTERS / name).glob("*.py"))
        for folder in (CPP_METHODS, CSRC / "model" / "heads"):
            own |= {folder / f"{name}.cpp", folder / f"{name}.h"}
        own.add(PACKAGE / "adapt" / "heads" / f"{name}.py")
    pattern = name_pattern(method)
    found = []
    for path in [*cpp_files("core", "model", "runtime"), *python_files()]:
        if path in own:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # A field of other servers, refused by its name.
            if pattern.search(line.replace("no_repeat_ngram_size", "")):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


# ---- Nothing that runs data ---------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_BUILTINS = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system")}
CONVERTER = PACKAGE / "tools" / "convert_drafter.py"  # run by hand; the engine does not import it


def safe_loads(tree: ast.AST) -> set[ast.AST]:
    """The `torch.load` of calls with a literal `weights_only=True`."""
    return {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and any(
            keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
            for keyword in node.keywords
        )
    }


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_nothing_runs_data(path: Path) -> None:
    wrong = []
    tree = parsed(path)
    allowed = safe_loads(tree) if path == CONVERTER else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wrong += [node.module] * (node.module.split(".")[0] in FORBIDDEN_MODULES)
            wrong += [
                f"{node.module}.{a.name}"
                for a in node.names
                if (node.module, a.name) in FORBIDDEN_CALLS
            ]
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_BUILTINS:
            wrong.append(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and node not in allowed
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in FORBIDDEN_CALLS
        ):
            wrong.append(f"{node.value.id}.{node.attr}")
    assert not wrong, f"{relative(path)} uses {', '.join(wrong)}"


SOURCE_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
MAX_README_LINES = 40


def source_folders() -> list[Path]:
    return sorted(
        folder
        for top in (CSRC, PACKAGE, ROOT / "tests")
        for folder in (top, *top.rglob("*/"))
        if folder.is_dir() and any(path.suffix in SOURCE_SUFFIXES for path in folder.iterdir())
    )


@pytest.mark.parametrize("folder", source_folders(), ids=relative)
def test_folder_says_what_it_is(folder: Path) -> None:
    readme = folder / "README.md"
    assert readme.is_file(), f"{relative(readme)}: what is here, what it may use, where to start"
    assert len(readme.read_text().splitlines()) <= MAX_README_LINES, relative(readme)


@pytest.mark.parametrize(
    "folder",
    [f for f in source_folders() if f.is_relative_to(CSRC) or f.is_relative_to(PACKAGE)],
    ids=relative,
)
def test_folder_names_its_files(folder: Path) -> None:
    """In code, with or without the suffix; `<op>` stands for `<op>_cpu` as well."""
    code = re.findall(r"`[^`\n]+`|^    .*$", (folder / "README.md").read_text(), re.M)
    words = {word for text in code for word in re.findall(r"\w+", text)}
    missing = [
        path.name
        for path in sorted(folder.iterdir())
        if path.suffix in SOURCE_SUFFIXES
        and path.stem != "__init__"
        and not {path.stem, path.stem.removesuffix("_cpu")} & words
    ]
    assert not missing, f"{relative(folder)}/README.md does not name {', '.join(missing)}"


def test_no_paths_of_somebodys_machine() -> None:
    git = subprocess.run(
        ["git", "grep", "-nIE", r"(^|[^A-Za-z0-9_./$-])/(root|work|home/[a-z]+|Users/[A-Za-z]+)/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if git.returncode not in (0, 1):
        pytest.skip(f"needs a git checkout: {git.stderr.strip()}")
    found = [
        line for line in git.stdout.splitlines() if not line.startswith(relative(Path(__file__)))
    ]
    assert not found, "\n".join(found)
