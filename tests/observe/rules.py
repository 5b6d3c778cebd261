"""The alerts of the chart, as it renders them, under promtool: what they fire on, and what not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

_ROOT: Final = Path(__file__).parents[2]
_CASES: Final = Path(__file__).parent / "alerts.yaml"
_RELEASE: Final = "weft"
NAMESPACE: Final = "rl"
#: The labels by which rules know the pool's processes, as the Prometheus operator sets them.
LABELS: Final = {
    "coordinator": {"namespace": NAMESPACE, "service": f"{_RELEASE}-coordinator"},
    "replica": {"namespace": NAMESPACE, "service": f"{_RELEASE}-replicas"},
}
_WORDS: Final = {
    "COORDINATOR": f'namespace="{NAMESPACE}",service="{_RELEASE}-coordinator"',
    "REPLICA": f'namespace="{NAMESPACE}",service="{_RELEASE}-replicas",pod="{_RELEASE}-replicas-0"',
    "OTHER_POOL": f'namespace="other",service="{_RELEASE}-coordinator"',
    "CATALOG": f'namespace="{NAMESPACE}",persistentvolumeclaim="{_RELEASE}-catalog"',
}

Rule = dict[str, Any]


def render(helm: Path | str, to: Path) -> list[Rule]:
    """The rules of the profile for GPUs; written to a file as Prometheus reads it."""
    command = [
        helm, "template", _RELEASE, _ROOT / "helm/weft", "--namespace", NAMESPACE,
        "--values", _ROOT / "helm/weft/values-gpu.yaml",
        "--show-only", "templates/monitoring.yaml",
    ]  # fmt: skip
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (rule,) = (
        r for r in yaml.safe_load_all(text) if r is not None and r["kind"] == "PrometheusRule"
    )
    to.write_text(json.dumps(rule["spec"]))
    rules: list[Rule] = rule["spec"]["groups"][0]["rules"]
    return rules


def check(promtool: str, rules_file: Path, rules: list[Rule]) -> int:
    """Whether promtool takes the rules, and each fires on what it is for alone.

    Returns:
        How many cases there are; each alert has one at which it fires, and one at which it does
        not.
    """
    _run(promtool, "check", "rules", rules_file)
    cases = yaml.safe_load(_CASES.read_text())
    assert cases.keys() == {rule["alert"] for rule in rules}, "each alert has cases, and no other"
    tests = [_test(rule, case) for rule in rules for case in cases[rule["alert"]]]
    for alert, known in cases.items():
        assert {"fires", "silent"} <= {kind for case in known for kind in case}, alert
    document = {"rule_files": [str(rules_file)], "evaluation_interval": "1m", "tests": tests}
    file = rules_file.with_name("tests.yaml")
    file.write_text(json.dumps(document))
    _run(promtool, "test", "rules", file)
    return len(tests)


def _test(rule: Rule, case: dict[str, Any]) -> dict[str, Any]:
    """A case as promtool has them: whether the alert fires, with the labels that its text
    speaks of."""
    fires = "fires" in case
    spoken = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    labels = "".join(f',{label}!=""' for label in spoken)
    firing = f'ALERTS{{alertname="{rule["alert"]}",alertstate="firing"{labels}}}'
    return {
        "name": f"{rule['alert']} {'fires' if fires else 'is silent'}: "
        f"{case['fires' if fires else 'silent']}",
        "interval": "1m",
        "input_series": [
            {"series": _filled(series), "values": values}
            for series, values in case["series"].items()
        ],
        "promql_expr_test": [
            {
                "expr": f"count({firing})",
                "eval_time": f"{case['minute']}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def _filled(series: str) -> str:
    for word, labels in _WORDS.items():
        series = series.replace(word, labels)
    return series


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
