"""Who may import whom, what stays free of torch, how long things may be: read from the syntax tree, nothing is run.

The tables below are the rules. `docs/decisions` says why; a change here is a design decision, not a repair.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

# Module or package (without "forerun.") -> what it may import of ours. The longest name that fits a module counts.
# A package may import itself, except where SEPARATE says otherwise. errors is open to everyone.
IMPORTS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": (),
    "config": (),
    "mini": (),
    "kernels": (),
    "quant": ("kernels",),
    "layers": ("quant", "kernels"),
    "progress": (),
    "weights": ("", "config", "mini"),  # "": to find the installed package's folder
    "models": ("layers", "quant", "kernels", "weights", "core", "config"),
    "runtime": ("models", "speculation", "kernels", "config"),
    "runtime.parallel": (
        "runtime.parallel",
        "block_identity",
        "models",
        "cache",
        "weights",
        "kernels",
        "config",
        "",
    ),
    "models.base": ("models.batch", "kernels.ops", "kernels.recurrent_ops"),
    "models.batch": ("speculation.tree", "speculation.draft", "cache", "core", "kernels.ops"),
    "cache": ("kernels", "core", "models.base"),
    "speculation": ("core", "kernels"),
    "drafters": (
        "drafters.base",
        "drafters.autoregressive",
        "drafters.following",
        "drafters.translated",
        "speculation",
        "runtime",
        "models",
        "cache",
        "kernels.cores",
        "kernels.device",
        "kernels.ops",
        "kernels.suffix",
        "weights.translation",
        "core",
        "config",
    ),
    "drafters.registry": ("drafters", "weights", "config"),
    "drafters.named": ("drafters", "weights", "config"),
    "drafters.portfolio": (
        "drafters",
        "speculation",
        "models",
        "cache",
        "kernels.ops",
        "kernels.cores",
        "core",
        "config",
    ),
    "learned": ("policy", "drafters.base"),
    "bench.drafters": ("bench", "assemble", "drafters", "llm", "policy", "core", "config"),
    "policy": ("drafters.base", "speculation.draft", "core"),
    "engine": (
        "policy",
        "drafters.base",
        "runtime.runner",
        "speculation",
        "cache",
        "models",
        "kernels",
        "core",
        "config",
    ),
    "block_identity": ("", "cache", "models", "weights", "kernels"),
    "tiering": (
        "block_identity",
        "engine",
        "cache",
        "drafters.registry",
        "runtime.parallel.leader",
        "models",
        "weights",
        "kernels",
        "config",
    ),
    "assemble": (
        "learned",
        "tiering",
        "policy",
        "engine",
        "drafters",
        "runtime",
        "speculation",
        "cache",
        "models",
        "weights",
        "kernels",
        "core",
        "config",
        "mini",
    ),
    "frontend": ("drafters.registry", "engine.outputs", "engine.stopping", "weights", "core", "config"),
    "opening": ("drafters.registry", "models", "runtime.parallel", "kernels", "weights", "config"),
    "llm": (
        "frontend",
        "assemble",
        "opening",
        "tiering",
        "progress",
        "engine",
        "drafters",
        "runtime",
        "speculation",
        "cache",
        "models",
        "weights",
        "kernels",
        "core",
        "config",
        "mini",
    ),
    "": ("llm", "core", "config"),
    "training": (
        "",
        "llm",
        "server.thoughts",
        "progress",
        "engine",
        "cache.states",
        "quantize.pool",
        "models",
        "weights",
        "kernels",
        "core",
        "config",
    ),
    "quantize": ("", "llm", "models", "layers", "quant", "weights", "kernels", "core", "config"),
    "bench": (
        "",
        "llm",
        "policy",
        "progress",
        "drafters",
        "engine",
        "runtime",
        "models",
        "quant",
        "cache",
        "weights",
        "kernels",
        "speculation.selfcheck",
        "core",
        "config",
    ),
    "server": ("", "llm", "frontend", "drafters.registry", "engine", "cache.lower", "weights", "core", "config"),
    "replicas": (
        "",
        "llm",
        "frontend",
        "server",
        "drafters.named",
        "engine.outputs",
        "runtime.parallel.start",  # what tells weights from others
        "weights.identity",
        "weights.tokenizer",
        "core",
        "config",
    ),
    "cli": ("",),  # anything: see ANYTHING
}
ANYTHING = ("cli",)
SEPARATE = ("drafters",)  # files of these packages do not know each other, but for what IMPORTS names

NO_TORCH = (
    "core",
    "config",
    "errors",
    "engine.scheduler",
    "engine.sharing",
    "cache.block_pool",
    "cache.lower",
    "cache.prefix_cache",
    "server.schema",
    "server.responses_schema",
    "server.messages_schema",
    "server.settings",
)
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface_hub")
QUICK_START = "cli.app"  # `forerun --help` loads this, and must not load anything heavy

MAX_FUNCTION_LINES = 60
LONG_FILE = 400  # lines from which a file is on the list below, so that somebody has thought about where it divides
LONG_FILES: dict[str, str] = {}  # path from the root -> why it is one thing all the same
LONG_FUNCTIONS: dict[str, str] = {}  # "module:function" -> why it is longer

OPTIONS = {
    "DrafterConfig": (
        "name",
        "model",
        "max_draft_tokens",
        "tree_width",
        "adaptive",
        "ngram_min",
        "ngram_max",
        "across_requests",
        "corpus",
        "layers",
        "head_weights",
        "draft_vocabulary",
        "members",
    ),
    "EngineConfig": (
        "model",
        "dtype",
        "implementation",
        "drafter",
        "verification",
        "chain_rule",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_prefill_tokens",
        "max_num_batched_nodes",
        "max_num_waiting",
        "priority_s",
        "keep_learned",
        "prefix_caching",
        "block_size",
        "kv_cache_dtype",
        "num_kv_blocks",
        "kv_cache_bytes",
        "kv_disk",
        "kv_disk_gib",
        "kv_host_gib",
        "kv_events",
        "kv_events_replay",
        "kv_events_topic",
        "device",
        "kernels",
        "activations",
        "threads",
        "pin_threads",
        "tensor_parallel",
        "pipeline_parallel",
        "rank_timeout_s",
        "rank_start_s",
        "seed",
        "generation_config",
        "lora",
    ),
}


# Classes of one name in Python and C++ -> why.
MIRRORED = {
    "Program": "a recorded forward: C++ has its ops and addresses, Python the tensors that they are and the checks",
}


@cache
def module_paths() -> dict[str, Path]:
    """Every module of ours, by its name without "forerun."; a package goes by its own name, the root by ""."""
    names = {}
    for path in sorted((SOURCE / "forerun").rglob("*.py")):
        parts = path.relative_to(SOURCE / "forerun").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(module_paths()[module].read_text("utf-8"))


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(module)))


def imported_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Full names of what import statements bring in: `from a.b import c` gives a.b.c."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_module(name: str) -> str | None:
    """The module of ours behind an imported name, which may be something inside it; None for others' modules."""
    if name != "forerun" and not name.startswith("forerun."):
        return None
    short = name.removeprefix("forerun").removeprefix(".")
    while short not in module_paths() and "." in short:
        short = short.rpartition(".")[0]
    return short if short in module_paths() else ""


def fits(module: str, prefix: str) -> bool:
    return module == prefix or (prefix != "" and module.startswith(prefix + "."))


def rule_for(module: str) -> str:
    return max((prefix for prefix in IMPORTS if fits(module, prefix)), key=len)


def allowed(module: str, target: str) -> bool:
    rule = rule_for(module)
    package = module.split(".")[0]
    own = fits(target, package) and package not in SEPARATE and rule == package
    named = any(fits(target, prefix) for prefix in (*IMPORTS[rule], "errors"))
    return package in ANYTHING or own or named or target == module


def test_imports_follow_the_table() -> None:
    wrong = []
    for module in module_paths():
        targets = {our_module(name) for name in imported_names(nodes_of(module))} - {None}
        wrong += [f"{module} imports {target}" for target in targets if target and not allowed(module, target)]
    assert not wrong, "see IMPORTS in this file"


def test_every_package_has_a_rule() -> None:
    packages = {name.split(".")[0] for name in module_paths()}
    assert packages <= set(IMPORTS), f"add a row to IMPORTS for {sorted(packages - set(IMPORTS))}"


def loaded_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not inside functions, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from loaded_at_import(child)


def reached(module: str, with_packages: bool) -> dict[str, str]:
    """Others' top-level modules loaded with `module`, directly or through ours -> the module of ours that does it."""
    todo, seen, found = [module], set(), {}
    while todo:
        current = todo.pop()
        if current in seen or current not in module_paths():
            continue
        seen.add(current)
        if with_packages and current:
            todo.append(current.rpartition(".")[0])
        for name in imported_names(loaded_at_import(tree_of(current))):
            ours = our_module(name)
            if ours is None:
                found.setdefault(name.split(".")[0], current)
            else:
                todo.append(ours)
    return found


@pytest.mark.parametrize("module", NO_TORCH)
def test_no_torch_in(module: str) -> None:
    assert "torch" not in reached(module, with_packages=False)


def test_the_command_line_starts_without_heavy_imports() -> None:
    found = reached(QUICK_START, with_packages=True)
    assert not {name: found[name] for name in HEAVY if name in found}


def test_no_global_statement() -> None:
    assert not [(m, node.lineno) for m in module_paths() for node in nodes_of(m) if isinstance(node, ast.Global)]


def test_only_config_reads_the_environment() -> None:
    assert reads_environment("config")
    assert not [module for module in module_paths() if module != "config" and reads_environment(module)]


def reads_environment(module: str) -> bool:
    names = set(imported_names(nodes_of(module)))
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return bool((names | attributes) & {"os.environ", "os.getenv", "os.environb"})


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every function's dotted name and number of lines."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from functions(child, name)


def test_no_function_is_too_long() -> None:
    found = {f"{m}:{name}": lines for m in module_paths() for name, lines in functions(tree_of(m))}
    long = {name: lines for name, lines in found.items() if lines > MAX_FUNCTION_LINES}
    assert not set(long) - set(LONG_FUNCTIONS), f"split these, or name them with a reason: {long}"
    assert not set(LONG_FUNCTIONS) - set(long), "these exceptions are no longer needed"


def test_long_files_are_one_thing() -> None:
    native = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".inc")]
    counts = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in (*module_paths().values(), *native)
    }
    long = {path: lines for path, lines in counts.items() if lines > LONG_FILE}
    assert not set(long) - set(LONG_FILES), f"split by meaning, or say in LONG_FILES why each is one thing: {long}"
    assert not set(LONG_FILES) - set(long), "these exceptions are no longer needed"


def test_modules_and_public_functions_say_what_they_are() -> None:
    missing = []
    for module in module_paths():
        tree = tree_of(module)
        missing += [] if ast.get_docstring(tree) or not tree.body else [module]
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{module}.{node.name}"]
    assert not missing, "no docstring"


def test_options_are_frozen() -> None:
    """A new option is a decision: write it down here and in docs/decisions."""
    from forerun.config import option_names

    assert option_names() == OPTIONS


def test_no_two_classes_share_a_name() -> None:
    """C++ classes that Python sees are among them."""
    names = Counter(
        node.name
        for folder in (SOURCE, ROOT / "lab")
        for path in (*folder.rglob("*.py"), *folder.rglob("*.pyi"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == set(MIRRORED)
