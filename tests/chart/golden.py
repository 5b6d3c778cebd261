"""Renderings of the chart, as files that people read: ``python -m tests.chart.golden`` writes them.

``golden/PROFILE.yaml`` has the objects and the notes of a profile; ``golden/cases.yaml`` what each
case of ``cases.yaml`` changes in those of its profile.
"""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CHART, PROFILES, Rendered, Resource, containers, render
from weft_rl import __version__

FOLDER = Path(__file__).with_name("golden")
CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
_FILES = {path.read_text(): f"({path.relative_to(CHART)})" for path in CHART.glob("files/*.py")}
_WIDTH, _LONGEST, _MOST_ON_A_LINE = 140, 4096, 6
#: On every object of the chart's own, which `test_names` holds.
COMMON_LABELS = {
    *(
        f"app.kubernetes.io/{key}"
        for key in ("name", "instance", "part-of", "managed-by", "version")
    ),
    "helm.sh/chart",
}


class _Dumper(yaml.CSafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_dashboard = text.startswith("{") and len(text) > _LONGEST
    text = "(the dashboard)" if is_dashboard else _FILES.get(text, text)
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    is_long = len(items) > _MOST_ON_A_LINE
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=False if is_long else None
    )


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def shown(resource: Resource) -> str:
    """Return an object as text, without the labels of every object and the words of alerts."""
    resource = json.loads(json.dumps(resource).replace(__version__, "(version)"))
    labels = resource.get("metadata", {}).get("labels", {})
    for key in COMMON_LABELS & labels.keys():
        del labels[key]
    if resource["kind"] == "PrometheusRule":
        for rule in resource["spec"]["groups"][0]["rules"]:
            del rule["annotations"]["summary"], rule["annotations"]["description"]
    return yaml.dump(
        resource, Dumper=_Dumper, sort_keys=False, width=_WIDTH, default_flow_style=None
    )


def notes(profile: str, *sets: str, **values: Any) -> str:
    """Return what Helm prints after an installation; it renders that on a cluster only."""
    with tempfile.TemporaryDirectory() as folder:
        chart = shutil.copytree(CHART, Path(folder) / "weft")
        shutil.copy(chart / "templates/NOTES.txt", chart / "files/NOTES.txt")
        (chart / "templates/notes.yaml").write_text(
            "kind: Notes\nmetadata: {name: notes}\n"
            'text: {{ tpl (.Files.Get "files/NOTES.txt") . | toJson }}\n'
        )
        text: str = render(profile, *sets, chart=chart, **values).of("Notes")["text"]
    return text


def referred(rendered: Rendered) -> Iterator[tuple[str, str]]:
    """Yield kinds and names of what pods refer to."""
    for _, pod in rendered.pods():
        for volume in pod["spec"]["volumes"]:
            for key, kind, name in (
                ("configMap", "ConfigMap", "name"),
                ("secret", "Secret", "secretName"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                if key in volume:
                    yield kind, volume[key][name]
        for container in containers(pod["spec"]):
            for variable in container.get("env", []):
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]
            for source in container.get("envFrom", []):
                for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                    if key in source:
                        yield kind, source[key]["name"]


def of_profile(profile: str) -> str:
    """Return what a profile renders, and what it needs that is there before it."""
    rendered = render(profile)
    needed = sorted({*referred(rendered)} - rendered.made())
    head = f"# There before it: {', '.join(map('/'.join, needed)) or 'nothing'}\n"
    printed = shown({"kind": "Notes", "text": notes(profile)})
    return head + "---\n".join([*map(shown, rendered.resources), printed])


def _parts(rendered: Rendered, text: str) -> dict[str, str]:
    parts = {f"{r['kind']}/{r['metadata']['name']}": shown(r) for r in rendered.resources}
    return parts | {"Notes": text}


def of_case(name: str) -> str:
    """Return the lines that a case changes, below the name of each object."""
    case = CASES[name]
    profile, sets, values = case["profile"], case.get("set", []), case.get("values", {})
    before = _parts(render(profile), notes(profile))
    after = _parts(render(profile, *sets, **values), notes(profile, *sets, **values))
    lines = [f"# {name}"]
    for part in [case["only"]] if "only" in case else sorted(before.keys() | after.keys()):
        old, new = before.get(part, ""), after.get(part, "")
        if not (old and new):
            lines.append(f"{'+' if new else '-'} {part}")
        if old != new and old:
            diff = [*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)]
            lines += [f"  {part}"] * bool(new)
            lines += [f"    {each}" for each in diff[2:] if new and not each.startswith("@@")]
        elif new and not old:
            lines += [f"    +{each}" for each in new.splitlines()]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write every file anew."""
    FOLDER.mkdir(exist_ok=True)
    for profile in PROFILES:
        (FOLDER / f"{profile}.yaml").write_text(of_profile(profile))
    (FOLDER / "cases.txt").write_text("\n".join(map(of_case, CASES)))


if __name__ == "__main__":
    write()
