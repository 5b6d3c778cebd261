"""Values that contradict each other are refused with a sentence before anything is installed."""

import re

import pytest
import yaml

from rollout_side.vllm_engine.server.refusals import REFUSED_OPTIONS
from tests.chart.rendering import CHART, ROOT, RefusedError, StrictLoader, render

_LINE = re.compile(r"(\w+): (.+) => (.+)")


def listed(section):
    """Profile, what is set on top, and a part of what is said, of a section of refusals.txt."""
    text = (ROOT / "tests/chart/refusals.txt").read_text().split("\n\n")[section]
    return [(m[1], m[2].split(" ++ "), m[3]) for m in map(_LINE.fullmatch, text.split("\n")) if m]


REFUSED, NOT_OF_THE_SCHEMA = listed(0), listed(1)


@pytest.mark.parametrize(("profile", "sets", "sentence"), REFUSED)
def test_contradictory_values_are_refused_with_a_sentence(profile, sets, sentence):
    with pytest.raises(RefusedError) as refusal:
        render(profile, *sets)
    said = [line for line in str(refusal.value).splitlines() if line.startswith("- ")]
    assert any(sentence in line for line in said), str(refusal.value)


ONE_NODE = ["model.sharedCache.enabled=true", "model.sharedCache.accessMode=ReadWriteOnce"]


@pytest.mark.parametrize(
    "sets",
    [
        ["replicas.count=1"],
        ["replicas.nodeSelector.kubernetes\\.io/hostname=a"],
        ["replicas.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].a=b"],
        ["model.sharedCache.existingClaim=a"],  # its access mode is not known here
    ],
)
def test_a_cache_of_one_node_is_taken_where_its_pods_are_on_one(sets):
    assert render("gpu", *ONE_NODE, *sets).pod("-replicas")


def test_a_cache_of_one_node_is_refused_where_affinity_is_of_another_kind():
    apart = ["replicas.nodeSelector.pool=gpu", "replicas.affinity.podAntiAffinity.a=b"]
    with pytest.raises(RefusedError, match="is of one node, and 4 replicas mount it"):
        render("gpu", *ONE_NODE, *apart)


@pytest.mark.parametrize(("profile", "sets", "said"), NOT_OF_THE_SCHEMA)
def test_the_schema_refuses_what_it_does_not_know(profile, sets, said):
    with pytest.raises(
        RefusedError, match="don't meet the specifications of the schema"
    ) as refusal:
        render(profile, *sets)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "worse"),
    [
        ("replicas.memory.shmGib", "0.25", "0.0"),
        ("replicas.memory.modelLoadGib", "3.5", "0.0"),
        ("replicas.memory.stagingGib", "0.5", "-0.5"),
        ("replicas.memory.retainedGib", "0.5", "-0.5"),
        ("replicas.memory.adaptersGib", "0.001", "0.0001"),
        ("replicas.spill.gib", "1.5", "0.0001"),
        ("replicas.unreadyAfterSeconds", "1.5", "0.5"),
        ("model.cacheGib", "0.5", "0.0"),
        ("coordinator.leaseSeconds", "0.01", "0.001"),
        ("coordinator.heartbeatSeconds", "0.5", "86401.5"),
        ("coordinator.lostAfterSeconds", "9.5", "a.b"),
        ("coordinator.stallSeconds", "86399.5", "1.5s"),
        ("coordinator.senderStallSeconds", "1.25", "1e3"),
        ("metrics.prometheusRule.pauseSeconds", "2.5", "0.0"),
    ],
)
def test_a_fraction_may_be_set_on_the_command_line(name, value, worse):
    """Helm's `--set` makes text of it; in a file it is a number. Both render the same."""
    whole = float(value)
    for key in reversed(name.split(".")):
        whole = {key: whole}
    more = ["metrics.prometheusRule.enabled=true"]
    assert render("cpu", f"{name}={value}", *more) == render("cpu", *more, **whole)
    with pytest.raises(RefusedError, match=name):
        render("cpu", f"{name}={worse}", *more)


def test_every_number_with_a_fraction_may_be_set_on_the_command_line():
    schema = (CHART / "values.schema.json").read_text()
    properties = schema[schema.index('"properties": {\n    "') :]
    assert '"type": "number"' not in properties  # but a definition that is text, too


def refusal_of(profile, sets):
    try:
        render(profile, *sets)
    except RefusedError as error:
        return str(error)
    return ""


def test_every_refusal_of_the_chart_is_provoked_here():
    text = (CHART / "templates/refusals.yaml").read_text()
    sentences = re.findall(r'append \$no (?:\(printf )?"([^"]+)"', text)
    assert len(sentences) == text.count("append $no") > 40
    said = "".join(refusal_of(profile, sets) for profile, sets, _ in REFUSED)
    fill_in = re.compile(r"%s|%v|%d|%\\\.[13]f")
    patterns = [fill_in.sub(".+", re.escape(sentence)) for sentence in sentences]
    assert [pattern for pattern in patterns if not re.search(f"- {pattern}", said)] == []


REPLICAS = {
    name: {key: value for key, value in (("short", each.short), ("taken", [*each.taken])) if value}
    | {"why": each.why}
    for name, each in REFUSED_OPTIONS.items()
}


def test_what_a_replica_refuses_of_vllms_arguments_is_known_here():
    """Its program says it seconds after a pod has started; here it is said before."""
    path = CHART / "files/vllm_options.yaml"
    assert yaml.load(path.read_text(), StrictLoader) == REPLICAS


@pytest.mark.parametrize("argument", REPLICAS)
def test_an_argument_that_a_replica_refuses_is_refused_here_however_it_is_written(argument):
    refused = REPLICAS[argument]
    short = refused.get("short", argument)
    for words in (
        [argument],
        [argument, "7"],
        [f"{argument}=7"],
        [f"--{argument[2:].replace('-', '_')}=7"],
        ["--seed=1", short, "7", "--seed=2"],
        [f"{short}=7"],
        *([[f"{short}7"]] if len(short) == 2 else []),
    ):
        with pytest.raises(RefusedError) as refusal:
            render("gpu", replicas={"vllmArgs": words})
        name = short if words[0].startswith(short) or short in words else argument
        said = f"- replicas.vllmArgs has {name}, which a replica refuses: {refused['why']}\n"
        assert said in f"{refusal.value}\n", words
    for value in refused.get("taken", ()):
        for words in ([argument, value], [f"{argument}={value}"], [short, value]):
            render("gpu", replicas={"vllmArgs": words})


SOCKETS = {
    "extraVolumes": [{"name": "sockets", "hostPath": {"path": "/run/weft"}}],
    "extraVolumeMounts": [{"name": "sockets", "mountPath": "/tmp/weft-10001"}],
}
TRAINER = {"name": "trainer", "image": "a", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}


@pytest.mark.parametrize(
    ("replicas", "taken"),
    [
        ({"count": 1, "sidecars": [TRAINER]}, True),
        ({"count": 2, "sidecars": [TRAINER]}, False),
        ({"count": 1, "sidecars": [{"name": "trainer", "image": "a"}]}, False),
        ({"count": 1, **SOCKETS}, True),
        ({"count": 2, **SOCKETS}, False),
        ({"count": 2, "nodeSelector": {"kubernetes.io/hostname": "a"}, **SOCKETS}, True),
        ({"count": 1}, False),
    ],
)
def test_one_sided_is_taken_where_a_trainer_may_share_the_replicas_sockets(replicas, taken):
    values = {"replicas": {"backend": "one-sided", **replicas}}
    if not taken:
        with pytest.raises(RefusedError, match=r"or make the trainer a sidecar of one replica"):
            render("cpu", **values)
        return
    assert render("cpu", **values).container("-replicas")["args"].count("--backend=one-sided") == 1


@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl", "one-sided"])
def test_helm_test_pushes_where_its_pod_could(backend):
    """It has no GPU, and shares no memory with replicas."""
    replicas = {"backend": backend, "count": 1, "sidecars": [TRAINER]}
    arguments = render("gpu", replicas=replicas).container("-test")["args"]
    assert ("--without-adapter" in arguments) == (backend in ("nccl", "one-sided"))


def test_the_default_directory_of_sockets_is_the_one_that_is_asked_for():
    """For the user that the pods run as, unless they are told another."""
    source = (ROOT / "weft_rl/transport/one_sided/directory.py").read_text()
    assert 'Path(given or f"/tmp/weft-{os.geteuid()}")' in source


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(RefusedError) as refusal:
        render("cpu", "replicas.backend=nccl", "replicas.drainSeconds=1")
    assert str(refusal.value).count("\n- ") == 2


@pytest.mark.parametrize(
    ("quantity", "gib"),
    [
        ("4Gi", 4),
        ("4096Mi", 4),
        ("4194304Ki", 4),
        ("3.5Gi", 3.5),
        ("4G", 3.725),
        ("4000M", 3.725),
        ("4294967296", 4),
        (4294967296, 4),
        ("0.004Ti", 4.096),
    ],
)
def test_a_memory_limit_is_understood_in_every_unit(quantity, gib):
    def with_load(load):
        memory = dict.fromkeys(("stagingGib", "retainedGib", "adaptersGib", "shmGib"), 0.25)
        replicas = {
            "memory": memory | {"modelLoadGib": load},
            "resources": {"limits": {"memory": quantity}},
        }
        return render("cpu", replicas=replicas)

    assert with_load(gib - 1 - 0.01)
    with pytest.raises(RefusedError, match="and a replica may take"):
        with_load(gib - 1 + 0.01)
