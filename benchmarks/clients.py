"""The client tour: programs nobody here wrote, installed as they are published, against a server of ours.

    python benchmarks/clients.py [--only openai,guidellm] [--work FOLDER] [--write docs/clients.md]

Each client gets an environment of its own under FOLDER (venv or node_modules; kept between runs), runs its script of
`benchmarks/clients/` and says for each thing tried whether it worked. Prints a table, exits with 1 if anything failed
or could not be installed, and with --write puts the table into the page of the documentation. Needs the package index
and npm; `uv`, where it is installed, makes installing quick. Knows: how clients are installed and run. Does not know:
what they do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from serving import server

SCRIPTS = Path(__file__).with_name("clients")
TORCH = "torch==2.13.0"  # first and by itself where a client wants torch, or it may bring a CUDA build
KEY, LIMIT_S = "tour-key", 600
BEGIN, END = "<!-- the tour's table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Client:
    """What is installed (the first package's version is reported), and by what."""

    name: str
    script: str
    packages: tuple[str, ...] = ()
    torch: bool = False


CLIENTS = (
    Client("curl", "curl.sh"),
    Client("browser, another origin", "browser.mjs", ("playwright-core",)),
    Client("openai (Python)", "openai_python.py", ("openai",)),
    Client("openai (Node)", "openai_node.mjs", ("openai",)),
    Client("anthropic (Python)", "anthropic_python.py", ("anthropic",)),
    Client("@anthropic-ai/sdk", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Client("openai-agents (Python)", "openai_agents.py", ("openai-agents",)),
    Client("@openai/agents", "agents_node.mjs", ("@openai/agents", "openai", "zod")),
    Client(
        "AI SDK", "ai_sdk_node.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
    ),
    Client("LangChain (Python)", "langchain_python.py", ("langchain-openai", "langchain-anthropic", "langchain")),
    Client("LangChain (Node)", "langchain_node.mjs", ("@langchain/openai", "@langchain/core")),
    Client("LlamaIndex", "llama_index_python.py", ("llama-index-llms-openai-like",)),
    Client("litellm", "litellm_python.py", ("litellm", "mcp")),
    Client("instructor", "instructor_python.py", ("instructor",)),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("dspy", "dspy_python.py", ("dspy",)),
    Client("Haystack", "haystack_python.py", ("haystack-ai",)),
    Client("Semantic Kernel", "semantic_kernel_python.py", ("semantic-kernel",)),
    Client("AutoGen", "autogen_python.py", ("autogen-agentchat", "autogen-ext[openai]")),
    Client("CrewAI", "crewai_python.py", ("crewai",)),
    Client("smolagents", "smolagents_python.py", ("smolagents[openai]",)),
    Client("magentic", "magentic_python.py", ("magentic",)),
    Client("outlines", "outlines_python.py", ("outlines[openai]",)),
    Client("guidance", "guidance_python.py", ("guidance", "openai")),
    Client("aider", "aider_cli.py", ("aider-chat",)),
    Client("llm", "llm_cli.py", ("llm",)),
    Client("shell-gpt", "shell_gpt_cli.py", ("shell-gpt", "click")),
    Client("lm-eval", "lm_eval_cli.py", ("lm-eval[api]",)),
    Client("guidellm", "guidellm_cli.py", ("guidellm",), torch=True),
)


@dataclass(frozen=True)
class Visit:
    """What a client's run brought."""

    client: Client
    version: str
    worked: tuple[str, ...]
    failed: tuple[str, ...]  # what, and why


def main() -> None:
    """Visit every client asked for."""
    given = options()
    wanted = [
        c for c in CLIENTS if not given.only or any(part in c.name.lower() for part in given.only.lower().split(","))
    ]
    given.work.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    arguments = ["--api-key", KEY, "--allowed-origins", f"http://127.0.0.1:{port}"]
    with server(given.model, arguments) as (url, _):
        surroundings = {"TOUR_URL": url, "TOUR_KEY": KEY, "TOUR_MODEL": given.model, "TOUR_ORIGIN_PORT": str(port)}
        visits = [_told(visit(client, given.work, surroundings)) for client in wanted]
    print(table(visits))
    if given.write:
        write(given.write, visits)
    sys.exit(any(one.failed for one in visits))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--only", default="", help="parts of clients' names, separated by commas")
    parser.add_argument("--work", type=Path, default=Path("benchmarks/out/clients"), help="where clients are installed")
    parser.add_argument("--write", type=Path, help="the page whose table is to be replaced")
    return parser.parse_args()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def visit(client: Client, work: Path, surroundings: dict[str, str]) -> Visit:
    """Install a client and run its script."""
    folder = work.absolute() / client.script.partition(".")[0]
    try:
        command, version = installed(client, folder)
    except subprocess.CalledProcessError as error:
        return Visit(client, "-", (), (f"install: {(error.stderr or '')[-300:]}",))
    kept = {**os.environ, **surroundings, "NODE_PATH": str(folder / "node_modules"), "PYTHONPATH": str(SCRIPTS)}
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [*command], cwd=folder, env=kept, stdout=subprocess.PIPE, stderr=log, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Visit(client, version, (), (f"it took longer than {LIMIT_S} s",))
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    worked = tuple(line[1] for line in lines if line[0] == "ok")
    failed = [": ".join(line[1:]) for line in lines if line[0] == "FAIL"]
    if done.returncode or not (worked or failed):
        failed.append(f"exit status {done.returncode}; see {folder / 'log.txt'}")
    return Visit(client, version, worked, tuple(failed))


def installed(client: Client, folder: Path) -> tuple[Sequence[str], str]:
    """The command that runs a client's script, and the client's version; installs what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    script = SCRIPTS / client.script
    if script.suffix == ".sh":
        first = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
        return ["bash", str(script)], first.split()[1]
    if script.suffix == ".mjs":
        return _node(client, folder, script)
    python = folder / "venv" / "bin" / "python"
    if not (folder / "done").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(folder / "venv"))
        if client.torch:
            _run(str(python), "-m", "pip", "install", "-q", TORCH)
        uv = shutil.which("uv")
        quick = [uv, "pip", "install", "-q", "--python", str(python)] if uv and not client.torch else None
        _run(*(quick or [str(python), "-m", "pip", "install", "-q"]), *client.packages)
        (folder / "done").touch()
    name = client.packages[0].partition("[")[0]
    version = _run(str(python), "-c", f"import importlib.metadata as m; print(m.version({name!r}))")
    return [str(python), str(script)], version.strip()


def _node(client: Client, folder: Path, script: Path) -> tuple[Sequence[str], str]:
    """Modules are found beside the script, so the script is copied."""
    if not (folder / "done").exists():
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages)
        (folder / "done").touch()
    for path in (script, SCRIPTS / "tour.mjs"):
        shutil.copy(path, folder)
    package = json.loads((folder / "node_modules" / client.packages[0] / "package.json").read_text("utf-8"))
    return ["node", script.name], package["version"]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _told(one: Visit) -> Visit:
    print(f"{one.client.name} {one.version}: {len(one.worked)} worked, {len(one.failed)} failed", flush=True)
    for reason in one.failed:
        print(f"    {reason}", flush=True)
    return one


def table(visits: Sequence[Visit]) -> str:
    """The visits as Markdown."""
    rows = ["| client | version | works | does not |", "|---|---|---|---|"]
    for one in visits:
        rows.append(
            f"| {one.client.name} | {one.version} | {'; '.join(one.worked) or '-'} | {'; '.join(one.failed) or '-'} |"
        )
    return "\n".join(rows)


def write(page: Path, visits: Sequence[Visit]) -> None:
    """Replace the page's table."""
    text = page.read_text("utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\nRun on {date.today()}.\n\n{table(visits)}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
