"""Commands, options, defaults and arguments that the manual quotes are those of the code."""

import ast
import inspect
import re
import shlex
import typing

import pytest
import typer.main

from tests.unit.docs.pages import ROOT, Page, page, pages
from trainer_side import Publisher
from weft_rl.cli.main import app
from weft_rl.v1 import (
    admin_pb2,
    generate_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
)

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
#: Options of others that the manual names: vLLM's server, torchrun, pip, protoc, our scripts.
OTHERS = {
    "--api-server-count", "--data-parallel-size", "--dtype", "--enable-lora", "--enable-scale-out",
    "--enforce-eager", "--gpu-memory-utilization", "--headless", "--load-format", "--lora-modules",
    "--max-lora-rank", "--no-build-isolation", "--nproc-per-node", "--pipeline-parallel-size",
    "--calculate-kv-scales", "--enable-tower-connector-lora", "--ec-transfer-config",
    "--kv-offloading-size", "--speculative-config", "--download-dir",
    "--kv-transfer-config", "--quantization", "--served-model-name", "--standalone",
    "--tensor-parallel-size", "--prefill-context-parallel-size", "--decode-context-parallel-size",
    "--nnodes", "--node-rank", "--master-addr", "--distributed-executor-backend", "--enable-eplb",
    "--enable-elastic-ep", "--enable-expert-parallel",
    "--offload-group-size", "--cpu-offload-gb",
    "--enable-mixed-moe-lora-format", "--moe-backend", "--enable-moe-shared-loras",
    "--help", "--max-cpu-loras", "--max-loras", "--max-model-len", "--port", "--host",
    "--generation-config", "--logprobs-mode", "--kv-cache-memory-bytes", "--api-key",
    "--ssl-certfile", "--otlp-traces-endpoint",
}  # fmt: skip
#: Options of the scripts that ``python -m`` runs here.
SCRIPTS = {
    option
    for folder in ("benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
    for option in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', path.read_text())
}
SEPARATORS = {"|", "||", "&&", ";", ">", "&"}


def options(command: str) -> dict:
    """The parameters of a command by each of their spellings."""
    found = {}
    for param in COMMANDS[command].params:
        for spelling in (*param.opts, *param.secondary_opts):
            found[spelling] = param
    return found


ALL = {spelling: param for param in GROUP.params for spelling in param.opts}
ALL |= {spelling: param for command in COMMANDS for spelling, param in options(command).items()}


def lines(page: Page) -> list[str]:
    """What is quoted as typed: what stands in backticks, and each line of the blocks."""
    quoted = list(page.spans)
    for block in page.blocks:
        if block.language not in ("python", "mermaid", "proto"):
            quoted += block.text.replace("\\\n", " ").splitlines()
    return quoted


def words(line: str) -> list[str]:
    """The words of a line as a shell has them; what is optional counts as given."""
    line = re.sub(r"^\$ ", "", line)
    try:
        return shlex.split(re.sub(r"[\[\]…]", " ", line), comments=True)
    except ValueError:
        return []  # prose with an apostrophe, a line of output


def wrong_commands(page: Page) -> list[str]:
    """Commands of ours that do not exist, or not so."""
    wrong = []
    for line in lines(page):
        typed = words(line)
        while typed and re.fullmatch(r"[A-Z_]+=\S*", typed[0]):  # its environment
            typed = typed[1:]
        if typed[:1] == ["weft"] and len(typed) > 1:
            wrong += [line] * (not is_command(typed[1:]))
        elif typed[:1] == ["make"] and len(typed) > 1:
            targets = [word for word in typed[1:] if "=" not in word]
            wrong += [line] * (not set(targets) <= TARGETS)
        elif typed[1:2] == ["-m"] and typed[0] in ("python", ".venv/bin/python"):
            wrong += [line] * (not is_module(typed[2]))
    return wrong


def is_command(typed: list[str]) -> bool:
    """Whether the command line takes these words."""
    if typed[0] not in COMMANDS:
        return typed[0] in ("--help", *(spelling for p in GROUP.params for spelling in p.opts))
    known = options(typed[0])
    after = None
    for word in typed[1:]:
        if word == "--" or word in SEPARATORS - {"|"}:
            break
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0]
            if name not in known and name != "--help":
                return False
            after = known.get(name)
        elif after is not None and not takes(after, word):
            return False
        else:
            after = None
    return True


def takes(param, value: str) -> bool:
    """Whether an option takes this value, where it says which it takes."""
    if not value or not set(value) <= set("abcdefghijklmnopqrstuvwxyz-"):
        return True  # a placeholder, a number
    choices = typing.get_args(param.type_descriptor.annotation)
    return not choices or value in choices


def is_module(name: str) -> bool:
    """Whether ``python -m`` runs it, if it is one of ours."""
    path = ROOT / name.replace(".", "/")
    if not (ROOT / name.partition(".")[0]).is_dir():
        return True
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def wrong_options(page: Page) -> list[str]:
    """Options in backticks that no command has, or with a value that none takes."""
    wrong = []
    for span in page.spans:
        typed = words(span)
        if not typed or not re.fullmatch(r"--[a-z][a-z-]+", typed[0]):
            continue
        if (param := ALL.get(typed[0])) is not None:
            wrong += [span] * (len(typed) > 1 and not takes(param, typed[1]))
        else:
            wrong += [span] * (typed[0] not in OTHERS | SCRIPTS)
    return wrong


DEFAULT = re.compile(
    r"`(--[a-z-]+|[a-z_]+)`(?:\s+\((?=[\d.,]+[),; ])|,\s+(?=[\d.,]+\s+by\s+default))([\d.,]+)"
)


def wrong_defaults(page: Page) -> list[str]:
    """Numbers right after an option or an argument, in parentheses or "by default"."""
    wrong = []
    for name, said in DEFAULT.findall(page.prose):
        number = float(said.rstrip(".,").replace(",", ""))
        if name in ALL:
            known = {p.default for c in COMMANDS for o, p in options(c).items() if o == name}
        elif name in ARGUMENTS:
            known = {ARGUMENTS[name]}
        else:
            continue
        if number not in known:
            wrong.append(f"{name} ({said})")
    return wrong


METHODS = {
    name: inspect.signature(method)
    for name, method in inspect.getmembers(Publisher)
    if name.startswith("push_")
} | {"Publisher": inspect.signature(Publisher)}
ARGUMENTS = {
    name: parameter.default
    for signature in METHODS.values()
    for name, parameter in signature.parameters.items()
}


def wrong_arguments(page: Page) -> list[str]:
    """Calls of a Publisher's in backticks with arguments that it does not take."""
    wrong = []
    for span in page.spans:
        try:
            tree = ast.parse(span.replace("…", "...").replace("=)", "=None)").replace("=,", "=0,"))
        except SyntaxError:
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            given = {keyword.arg for keyword in call.keywords}
            if name in METHODS and not given <= {*METHODS[name].parameters}:
                wrong.append(span)
    return wrong


SERVICES = {
    service.name: set(service.methods_by_name)
    for module in (
        admin_pb2,
        generate_pb2,
        inspect_pb2,
        publish_pb2,
        registry_pb2,
        rendezvous_pb2,
        replica_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
}


def wrong_calls(page: Page) -> list[str]:
    """Calls of services of ours that do not exist, in text and in tables of services."""
    text = "\n".join([page.prose, *(block.text for block in page.blocks)])
    named = re.findall(r"\b(\w+Service)[/.]([A-Z]\w+)", text)
    for service, row in re.findall(r"^\| `(\w+Service)` \|(.*)$", page.prose, re.MULTILINE):
        named += [(service, call) for call in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", row)]
    return [
        f"{service}.{call}"
        for service, call in named
        if service in SERVICES and call not in SERVICES[service]
    ]


CHECKS = [wrong_calls, wrong_commands, wrong_options, wrong_defaults, wrong_arguments]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_is_quoted_is_so(page, check):
    assert not check(page)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (wrong_commands, "`weft statsu`"),
        (wrong_commands, "`weft --instal-completion`"),
        (wrong_commands, "`weft rollout --staging outside -- model`"),
        (wrong_commands, "`weft coordinator --listen 1:2 --retian 3`"),
        (wrong_commands, "`make tset`"),
        (wrong_commands, "`python -m tests.nothing`"),
        (wrong_options, "`--retian 3`"),
        (wrong_options, "`--staging outside`"),
        (wrong_defaults, "`--stall-seconds` (11)"),
        (wrong_defaults, "`connect_seconds` (11)"),
        (wrong_defaults, "(`--base-copies`,\n2 by default: the one served)"),
        (wrong_calls, "`weft.v1.InspectService/GetPond`"),
        (wrong_calls, "| `InspectService` | anybody | GetPond |"),
        (wrong_arguments, "`Publisher(bakcend=)`"),
        (wrong_arguments, '`push_adapter(model, polcy="math")`'),
    ],
)
def test_what_is_wrong_is_found(check, text):
    assert check(Page(ROOT / "x.md", text, ()))


def test_the_table_of_a_publishers_arguments_has_their_defaults():
    text = page("docs/trainers.md").prose
    quoted = dict(re.findall(r"^\| `([a-z_]+)` \| `?([^|`]+)`? \|", text, re.MULTILINE))
    known = METHODS["Publisher"].parameters
    known = {n: p.default for n, p in known.items() if p.default is not inspect.Parameter.empty}
    assert len(quoted) > 5
    assert {name: ast.literal_eval(said) for name, said in quoted.items()}.items() <= known.items()


def test_every_benchmark_is_cited_or_belongs_to_one_that_is() -> None:
    """By a page, by its command or by what it recorded; else nobody runs it."""
    folder = ROOT / "benchmarks"
    sources = {path.stem: path.read_text() for path in folder.glob("*.py")}
    said = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    said += (folder / "README.md").read_text() + (ROOT / "Makefile").read_text()
    reached: set[str] = set()
    while found := {n for n in sources if re.search(rf"benchmarks\.{n}\b", said)} - reached:
        reached |= found
        said = "".join(sources[name] for name in found).replace("benchmarks import ", "benchmarks.")
    assert sources.keys() - reached == {"__init__"}
