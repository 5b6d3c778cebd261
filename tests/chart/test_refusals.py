"""Values that contradict each other are refused with a sentence before anything is installed."""

import re

import pytest
import yaml

from rollout_side.vllm_engine.server.refusals import REFUSED_OPTIONS
from tests.chart.rendering import CHART, ROOT, RefusedError, StrictLoader, render

MONITORED = [
    "metrics.enabled=true",
    "metrics.auth=true",
    "metrics.serviceMonitor.enabled=true",
    "metrics.serviceMonitor.scheme=https",
]
#: Profile, what is set on top, and what the refusal says.
REFUSED = [
    ("cpu", ["model.tiny=false"], "model.name is empty"),
    ("cpu", ["model.name=a"], "the tiny model has no other name"),
    ("cpu", ["model.claim=a"], "the tiny model is made in each pod"),
    ("cpu", ["model.volume.emptyDir.medium=Memory"], "model.volume and model.tiny are both given"),
    ("tokens", ["model.volume.emptyDir.medium=Memory"], "one of them is mounted at /models"),
    ("tokens", ["model.sharedCache.enabled=true"], "is not downloaded: choose one"),
    ("gpu", ["model.sharedCache.existingClaim=a"], "without model.sharedCache.enabled"),
    (
        "gpu",
        ["model.sharedCache.storageClassName=a"],
        "claim that the chart makes, and it makes no",
    ),
    ("everything", ["model.sharedCache.storageClassName=a"], "chart makes, and it makes none"),
    (
        "gateway",
        ["model.sharedCache.accessMode=ReadWriteOnce"],
        "8 replicas mount it: say ReadWriteMany, replicas.autoscaling.maxReplicas=1, or which node",
    ),
    (
        "gpu",
        ["model.sharedCache.enabled=true", "model.sharedCache.accessMode=ReadWriteOnce"],
        "is of one node, and 4 replicas mount it: say ReadWriteMany, replicas.count=1",
    ),
    ("gateway", ["serviceAccount.name="], "serviceAccount.create=false needs serviceAccount.name"),
    ("gpu", ["openai.service.loadBalancerClass=a"], "service.type=ClusterIP has no load balancer"),
    ("gpu", ["openai.service.externalTrafficPolicy=Local"], "ClusterIP has no traffic from outsi"),
    ("gateway", ["openai.httpRoute.parentRefs=[]"], "openai.httpRoute.enabled needs parentRefs"),
    ("gateway", ["coordinator.grpcRoute.parentRefs=[]"], "grpcRoute.enabled needs parentRefs"),
    (
        "gateway",
        [
            "networkPolicy.operators=[]",
            'coordinator.grpcRoute.parentRefs=[{"name": "public"}]',
        ],
        "networkPolicy.operators lets nobody in, and coordinator.grpcRoute has a gateway call",
    ),
    ("gateway", ["openai.httpRoute.caConfigMap=a"], "needs openai.httpRoute.enabled, and openai.t"),
    ("tokens", ["coordinator.grpcRoute.caConfigMap=a"], "needs coordinator.grpcRoute.enabled, and"),
    ("gateway", ["networkPolicy.clients=[]"], "networkPolicy.clients lets nobody in from outside"),
    (
        "cpu",
        ["openai.service.type=LoadBalancer"],
        "openai.service or openai.httpRoute has others call port 8000: name the gateway's",
    ),
    ("gateway", ["networkPolicy.operators=[]"], "coordinator.grpcRoute has others call port 50051"),
    ("tokens", ["coordinator.service.type=NodePort", "metrics.enabled=true"], "shows the page"),
    ("gateway", ["access.by=certificates"], "coordinator.grpcRoute ends TLS at the gateway"),
    ("tokens", ["model.name=Qwen/Qwen3-8B"], "is not below it"),
    ("tokens", ["model.name=/models-of-mine/qwen"], "is not below it"),
    ("tokens", ["model.claim="], "model.name=/models/qwen is a path, and nothing is mounted there"),
    ("gpu", ["model.name=./qwen"], "is a path, and nothing is mounted there"),
    ("cpu", ["insecure=false"], "nothing says how the pool is secured"),
    ("cpu", ["tls.replicasSecret=a"], "insecure=true serves without TLS"),
    ("cpu", ["tls.certManager.enabled=true"], "insecure=true serves without TLS"),
    ("cpu", ["access.by=tokens"], "insecure=true asks nobody"),
    ("cpu", ["access.existingConfigMap=a"], "insecure=true asks nobody"),
    ("cpu", ["openai.tls=true"], "openai.tls needs the replicas' certificate"),
    ("cpu", ["metrics.serviceMonitor.scheme=https"], "scheme=https needs certificates"),
    ("cpu", ["metrics.auth=true"], "insecure=true knows nobody"),
    ("gpu", ["tls.testSecret=a"], "makes the Secrets that"),
    ("gpu", ["tls.certManager.issuer.name="], "needs tls.certManager.issuer.name"),
    ("tokens", ["tls.replicasSecret="], "nothing says how the pool is secured"),
    ("tokens", ["tls.testSecret="], "helm test needs a certificate of its own"),
    ("tokens", ["access.tokens.replicas.secret="], "needs access.tokens.replicas.secret"),
    ("tokens", ["access.tokens.test.sha256="], "needs access.tokens.test.sha256"),
    ("gpu", ["access.existingConfigMap=a"], "has the whole access.toml"),
    ("gpu", ["replicas.count=300"], "say 1200 or more"),
    ("gpu", ["access.by=tokens"], "trainer-a.trainers.weft needs name and tokenSha256"),
    ("tokens", ["access.by=certificates"], "trainer-a needs san and no tokenSha256"),
    (
        "tokens",
        ["access.identities[0].san=trainer-a"],
        "needs name and tokenSha256 and no san",
    ),
    ("gpu", ["access.identities[0].policies=[]"], "publishes, but names no policies"),
    ("gpu", ["access.identities[0].roles={inspect}"], "has not the role publish"),
    ("cpu", ["coordinator.lostAfterSeconds=1"], "is less than heartbeatSeconds"),
    ("cpu", ["replicas.drainSeconds=59"], "would break the transfers that run"),
    ("gpu", ["replicas.tensorParallelSize=2"], "as many GPUs in the one pod"),
    ("cpu", ["replicas.staging=device"], "staging=device needs a GPU"),
    ("cpu", ["replicas.enableSleep=true"], "enableSleep needs a GPU"),
    ("cpu", ["replicas.backend=nccl"], "backend=nccl needs a GPU"),
    ("cpu", ["replicas.backend=one-sided"], "one-sided needs the trainer and all replicas on one"),
    ("cpu", ["replicas.rdma.enabled=true"], "rdma is for NCCL between GPUs"),
    ("gpu", ["replicas.rdma.enabled=true"], "rdma.enabled needs replicas.rdma.resources"),
    ("gpu", ["replicas.gpus=8"], "and uses no more: replicas.gpus is 8"),
    ("everything", ["replicas.backend=gloo"], "rdma is for NCCL between GPUs"),
    ("cpu", ["replicas.memory.retainedGib=0"], "has no room for one"),
    ("cpu", ["replicas.baseCopies=0"], "room for copies that nobody keeps"),
    ("gpu", ["replicas.staging=in-place"], "room for copies that nobody keeps"),
    ("gpu", ["replicas.baseCopies=0", "replicas.memory.retainedGib=0"], "it needs 1 or more"),
    ("cpu", ["replicas.spill.kind=existingClaim"], "needs replicas.spill.existingClaim"),
    ("gpu", ["replicas.spill.existingClaim=a"], "is not used with replicas.spill.kind"),
    ("cpu", ["replicas.resources.limits.memory=1Gi"], "is 1.0 GiB, and a replica may take 3.6"),
    ("cpu", ["replicas.memory.shmGib=0.125"], "is 128 MiB, and vLLM does not start with less than"),
    ("gpu", ["replicas.resources.limits.nvidia\\.com/gpu=2"], "say replicas.gpus"),
    ("gpu", ["replicas.vllmArgs={--enable-eplb}"], "--enable-eplb, which a replica refuses: vLLM"),
    ("gpu", ["replicas.env[0].name=VLLM_DP_SIZE"], "VLLM_DP_SIZE, which is for one of several"),
    ("cpu", ["tests.resources.requests.memory=5Gi"], "tests.resources.requests.memory is 5Gi, abo"),
    ("cpu", ["model.resources.limits.cpu=50m"], "requests.cpu is 100m, above the limit of 50m"),
    ("cpu", ["coordinator.resources.limits.memory=64Mi"], "is 128Mi, above the limit of 64Mi"),
    ("cpu", ["replicas.resources.requests.memory=8Gi"], "is 8Gi, above the limit of 3712Mi"),
    (
        "cpu",
        ["replicas.resources.limits.cpu=0.25"],
        "requests.cpu is 500m, above the limit of 0.25",
    ),
    ("gpu", ["replicas.vllmArgs={--api-key=secret}"], "say it by openai.apiKeySecret"),
    ("gpu", ['replicas.vllmArgs=["-tp", "4"]'], "say it by replicas.tensorParallelSize"),
    ("gpu", ["replicas.env[0].name=VLLM_SERVER_DEV_MODE"], "behind the versions"),
    ("gpu", ["replicas.env[0].name=WEFT_TLS_KEY"], "replicas.env has WEFT_TLS_KEY, which is the"),
    ("cpu", ["coordinator.env[0].name=HOME"], "coordinator.env has HOME, which is the chart's"),
    ("cpu", ["coordinator.env[0].name=WEFT_TRACES"], "coordinator.env has WEFT_TRACES, which is"),
    ("gpu", ['tests.env=[{"name": "WEFT_TLS_CA"}]'], "tests.env has WEFT_TLS_CA, which is the ch"),
    (
        "tokens",
        ['tests.env=[{"name": "HF_HUB_OFFLINE", "value": "0"}]'],
        "tests.env has HF_HUB_OFFLINE, which the chart gives with a model at /models",
    ),
    (
        "cpu",
        ['tests.env=[{"name": "A"}]', 'model.env=[{"name": "A"}]'],
        "tests.env has A, and so has model.env: choose one",
    ),
    (
        "everything",
        ["coordinator.env[0].name=OTEL_EXPORTER_OTLP_ENDPOINT"],
        "coordinator.env has OTEL_EXPORTER_OTLP_ENDPOINT, and so has tracesEndpoint",
    ),
    ("cpu", ['coordinator.env=[{"name": "A"}, {"name": "A"}]'], "coordinator.env has A twice"),
    (
        "cpu",
        ['replicas.env=[{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A"}]'],
        "replicas.env has A twice",
    ),
    (
        "everything",
        ['model.env=[{"name": "HF_TOKEN"}]'],
        "model.env has HF_TOKEN, which is the chart's",
    ),
    (
        "tokens",
        ['replicas.env=[{"name": "HF_HUB_OFFLINE", "value": "0"}]'],
        "replicas.env has HF_HUB_OFFLINE, which the chart gives with a model at /models",
    ),
    (
        "everything",
        ['replicas.env=[{"name": "HF_HOME", "value": "/a"}]'],
        "replicas.env has HF_HOME, which is the chart's",
    ),
    (
        "cpu",
        ['replicas.env=[{"name": "A"}]', 'model.env=[{"name": "A"}]'],
        "replicas.env has A, and so has model.env: choose one",
    ),
    (
        "cpu",
        ['replicas.extraVolumes=[{"name": "shm", "emptyDir": {}}]'],
        "replicas.extraVolumes: the name shm is taken",
    ),
    (
        "cpu",
        ['coordinator.extraVolumes=[{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]'],
        "coordinator.extraVolumes: the name a is taken",
    ),
    (
        "cpu",
        ['replicas.extraVolumeMounts=[{"name": "a", "mountPath": "/models"}]'],
        "replicas.extraVolumeMounts: the mountPath /models is taken",
    ),
    (
        "cpu",
        [
            'replicas.sidecars=[{"name": "a", "image": "a"}]',
            'replicas.initContainers=[{"name": "a", "image": "a"}]',
        ],
        "replicas.initContainers and sidecars: the name a is taken",
    ),
    (
        "cpu",
        ['coordinator.sidecars=[{"name": "coordinator", "image": "a"}]'],
        "coordinator.initContainers and sidecars: the name coordinator is taken",
    ),
    ("cpu", ['imagePullSecrets=[{"name": "a"}, {"name": "a"}]'], "imagePullSecrets has a twice"),
    (
        "gpu",
        [
            "replicas.topologySpread[1].topologyKey=topology.kubernetes.io/zone",
            "replicas.topologySpread[1].maxSkew=2",
            "replicas.topologySpread[1].whenUnsatisfiable=ScheduleAnyway",
            "replicas.topologySpread[0].topologyKey=topology.kubernetes.io/zone",
            "replicas.topologySpread[0].maxSkew=1",
            "replicas.topologySpread[0].whenUnsatisfiable=ScheduleAnyway",
        ],
        "replicas.topologySpread has topology.kubernetes.io/zone, ScheduleAnyway twice",
    ),
    ("tokens", ["coordinator.catalog.existingClaim=a"], "existingClaim says where: choose one"),
    ("tokens", ["coordinator.catalog.storageClassName=a"], "of the claim that the chart makes"),
    ("everything", ["coordinator.catalog.storageClassName=a"], "of the claim that the chart makes"),
    ("cpu", ["replicas.spill.storageClassName=a"], "replicas.spill.kind=none makes none"),
    ("everything", ["replicas.autoscaling.metrics=null"], "replicas.autoscaling needs metrics"),
    (
        "everything",
        ['replicas.autoscaling.kedaTriggers=[{"type": "cron", "metadata": {}}]'],
        "has metrics and kedaTriggers, and one autoscaler chooses",
    ),
    ("everything", ["replicas.autoscaling.minReplicas=9"], "is less than minReplicas"),
    ("gpu", ["metrics.enabled=false"], "metrics asks for what would read them"),
    ("gpu", ["metrics.auth=true"], "say metrics.serviceMonitor.scheme=https"),
    ("tokens", [*MONITORED], "asks Prometheus for a token: give metrics.serviceMonitor.basicAuth"),
    (
        "tokens",
        [*MONITORED, "access.by=certificates"],
        "asks Prometheus for a certificate, because access.by=certificates: give tls.monitorSecret",
    ),
    (
        "everything",
        ["metrics.serviceMonitor.basicAuthSecret=a"],
        "basicAuthSecret is a token, which is asked for by metrics.auth with access.by=tokens only",
    ),
    ("tokens", [*MONITORED, "tls.monitorSecret=a"], "tls.monitorSecret is shown to metrics.auth"),
    (
        "tokens",
        ["networkPolicy.egress.enabled=true"],
        "networkPolicy.egress.enabled is not used without networkPolicy.enabled",
    ),
    ("gpu", ['networkPolicy.egress.extra=[{"to": []}]'], "egress.extra is not used without netw"),
    (
        "gpu",
        ['networkPolicy.metrics=[{"podSelector": {}}]'],
        "networkPolicy.metrics lets no other namespace in",
    ),
    ("gpu", ["networkPolicy.metrics=[]"], "networkPolicy.metrics lets no other namespace in"),
]

#: The same of the schema: types, choices, and keys that are none.
NOT_OF_THE_SCHEMA = [
    ("replicas.replicas=3", "Additional property replicas is not allowed"),
    ("replicas.staging=disk", "replicas.staging"),
    ("replicas.enableSleep=2", "replicas.enableSleep"),
    ("replicas.count=-1", "replicas.count"),
    ("replicas.lora.maxRank=9", "replicas.lora.maxRank"),
    ("replicas.podDisruptionBudget.maxUnavailable=0", "podDisruptionBudget.maxUnavailable"),
    ("replicas.image.digest=sha256:12", "replicas.image.digest"),
    ("replicas.preStopSeconds=0", "replicas.preStopSeconds"),
    ("coordinator.image.repository=a@b", "coordinator.image.repository"),
    ("coordinator.replicas=2", "Additional property replicas is not allowed"),
    ("fullnameOverride=0a", "fullnameOverride"),
    ("fullnameOverride=a-name-of-more-than-forty-characters-is-cut", "fullnameOverride"),
    ("securityContext.runAsUser=0", "securityContext.runAsUser"),
    ("securityContext.privileged=true", "Additional property privileged is not allowed"),
    ("access.identities[0].roles[0]=replica", "access.identities.0.roles.0"),
    ("access.identities[0].roles[0]=coordinator", "access.identities.0.roles.0"),
    ('coordinator.env=[{"name": "A", "value": "b", "valueFrom": {}}]', "coordinator.env.0"),
    ("coordinator.catalog.whenDeleted=Keep", "coordinator.catalog.whenDeleted"),
    ("access.identities[0].role=publish", "Additional property role is not allowed"),
    ("networkPolicy.clients[0].pod=a", "Additional property pod is not allowed"),
    ("networkPolicy.egress.extra[0].from=[]", "Additional property from is not allowed"),
    ("networkPolicy.egress.extra=[{}]", "networkPolicy.egress.extra.0"),
    ("model.cacheGib=0", "model.cacheGib"),
    ("model.volume.name=models", "model.volume"),
    ("model.sharedCache.accessMode=ReadWriteOncePod", "model.sharedCache.accessMode"),
    ("commonLabels.weft-pool=a", "commonLabels"),
    ("commonLabels.team=a b", "commonLabels.team"),
    ("commonLabels.a b=c", "commonLabels"),
    ("metrics.serviceMonitor.labels.helm\\.sh/chart=a", "metrics.serviceMonitor.labels"),
    ("replicas.podLabels.app\\.kubernetes\\.io/name=a", "replicas.podLabels"),
    ('extraObjects=[{"kind": "ConfigMap"}]', "extraObjects.0"),
    ('replicas.envFrom=[{"secretRef": {}, "configMapRef": {}}]', "replicas.envFrom.0"),
    ('replicas.extraVolumeMounts=[{"name": "a", "mountPath": "models"}]', "Mounts.0.mountPath"),
    ('replicas.sidecars=[{"name": "a"}]', "image is required"),
    ("replicas.probes.startup.initialDelaySeconds=5", "initialDelaySeconds is not allowed"),
    ("replicas.probes.liveness.periodSeconds=0", "replicas.probes.liveness.periodSeconds"),
    ("replicas.rollingUpdate.partition=-1", "replicas.rollingUpdate.partition"),
    ("replicas.rollingUpdate.maxUnavailable=0", "replicas.rollingUpdate.maxUnavailable"),
    ('replicas.autoscaling.kedaTriggers=[{"type": "cron"}]', "metadata is required"),
    ("openai.service.type=ExternalName", "openai.service.type"),
    ("openai.service.loadBalancerSourceRanges[0]=10.0.0.1", "loadBalancerSourceRanges.0"),
    ('openai.httpRoute.parentRefs=[{"namespace": "a"}]', "name is required"),
    ("openai.httpRoute.pathPrefixes[0]=v1", "openai.httpRoute.pathPrefixes.0"),
    ("openai.httpRoute.requestTimeout=600", "openai.httpRoute.requestTimeout"),
    ("tls.certManager.extraDnsNames.coordinator[0]=a_b", "extraDnsNames.coordinator.0"),
]


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


@pytest.mark.parametrize(("value", "said"), NOT_OF_THE_SCHEMA)
def test_the_schema_refuses_what_it_does_not_know(value, said):
    with pytest.raises(
        RefusedError, match="don't meet the specifications of the schema"
    ) as refusal:
        render("cpu", value)
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
