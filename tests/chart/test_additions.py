"""What users of other charts set first: volumes, containers, claims, routes, autoscalers."""

import re

import pytest
import yaml

from tests.chart.rendering import CHART, PROFILES, RefusedError, args, render

EVERYTHING = render("everything")
GATEWAY = render("gateway")
PLAIN = render("gpu")
SERVERS = {"coordinator": "Deployment", "replicas": "StatefulSet"}


def values(profile="everything"):
    """The values of a profile of the tests."""
    return yaml.safe_load((CHART.parents[1] / f"tests/chart/profiles/{profile}.yaml").read_text())


def by_name(items):
    return {item["name"]: item for item in items}


# -- pods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
def test_a_pod_has_what_is_added_to_it(server):
    given = values()[server]
    pod = EVERYTHING.pod(f"-{server}")
    container = EVERYTHING.container(f"-{server}")
    assert pod["initContainers"] == given["initContainers"]
    assert pod["containers"][1:] == given["sidecars"]
    assert container["envFrom"] == given["envFrom"]
    assert container["env"][-1] == given["env"][-1]
    assert container["volumeMounts"][-1] == given["extraVolumeMounts"][0]
    assert pod["volumes"][-1] == given["extraVolumes"][0]
    for key in ("runtimeClassName", "priorityClassName", "nodeSelector", "tolerations", "affinity"):
        assert pod[key] == given[key], key
    assert pod.get("schedulerName") == given.get("schedulerName")


def test_the_tests_pod_has_what_is_added_to_it():
    """A place that is mounted over another of the chart's is refused, as at the servers."""
    given = {
        "env": [{"name": "SSL_CERT_FILE", "value": "/etc/our-ca/ca.crt"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "our-ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/our-ca", "readOnly": True}],
    }
    rendered = render("gpu", tests=given)
    pod = rendered.pod("-test")
    assert pod["volumes"][-1] == given["extraVolumes"][0]
    assert pod["containers"][0]["volumeMounts"][-1] == given["extraVolumeMounts"][0]
    assert pod["containers"][0]["env"][-1] == given["env"][0]
    own = {mount["mountPath"] for mount in render("gpu").container("-test")["volumeMounts"]}
    assert len(own) > 3
    for path in own:
        with pytest.raises(RefusedError, match=f"tests.extraVolumeMounts: .*{path} is taken"):
            render("gpu", tests={"extraVolumeMounts": [{"name": "ca", "mountPath": path}]})


def test_the_test_ends_by_itself_before_its_pod_is_ended():
    """It says then what it waited for."""
    pod = render("cpu").pod("-test")
    (seconds,) = [a.partition("=")[2] for a in pod["containers"][0]["args"] if "--timeout=" in a]
    assert pod["activeDeadlineSeconds"] >= int(seconds) + 300


@pytest.mark.parametrize("server", SERVERS)
def test_a_pod_has_nothing_that_is_not_asked_for(server):
    pod = PLAIN.pod(f"-{server}")
    assert len(pod["containers"]) == 1
    assert "envFrom" not in pod["containers"][0]
    absent = {"initContainers", "runtimeClassName", "schedulerName", "priorityClassName"}
    assert not absent & pod.keys()


@pytest.mark.parametrize(("server", "kind"), SERVERS.items())
def test_labels_and_annotations_are_where_they_are_asked_for(server, kind):
    given = values()[server]
    workload = EVERYTHING.of(kind)
    template = workload["spec"]["template"]["metadata"]
    assert workload["metadata"]["annotations"] == given["annotations"]
    assert template["annotations"] == given["podAnnotations"]
    assert given["podLabels"].items() <= template["labels"].items()
    assert not given["podLabels"].keys() & workload["metadata"]["labels"].keys()
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["labels"].items()
    plain = PLAIN.of(kind)
    assert "annotations" not in plain["metadata"] | plain["spec"]["template"]["metadata"]


def test_common_labels_are_on_every_object_of_the_charts_and_select_nothing():
    extra = {"TLSRoute", "ConfigMap"}
    for resource in EVERYTHING.resources:
        labels = resource["metadata"].get("labels", {})
        if resource["kind"] not in extra or labels:
            assert labels["team"] == "rl", resource["metadata"]["name"]
    for _, pod in EVERYTHING.pods():
        assert pod["metadata"]["labels"]["team"] == "rl"
    assert "team" not in str([r["spec"]["selector"] for r in EVERYTHING.all("Service")])
    assert "team" not in EVERYTHING.of("StatefulSet")["spec"]["selector"]["matchLabels"]


def test_a_label_that_is_given_twice_is_there_once():
    """The nearer one wins; every rendering of these tests refuses a key that is there twice."""
    labels = {"team": "nearer"}
    values = {
        "commonLabels": {"team": "rl", "a": "b"},
        "coordinator": {"podLabels": labels},
        "metrics": {
            name: {"enabled": True, "labels": labels}
            for name in ("serviceMonitor", "prometheusRule", "dashboard")
        },
    }
    rendered = render("gpu", **values)
    near = [*rendered.all("ServiceMonitor"), rendered.of("PrometheusRule")]
    near += [rendered.of("ConfigMap", "-dashboard"), rendered.of("Deployment")["spec"]["template"]]
    for resource in near:
        assert {"team": "nearer", "a": "b"}.items() <= resource["metadata"]["labels"].items()


def test_the_account_is_annotated_or_one_that_is_there():
    assert EVERYTHING.of("ServiceAccount")["metadata"]["annotations"] == {
        "cloud.example/role": "reader"
    }
    assert "annotations" not in PLAIN.of("ServiceAccount")["metadata"]
    assert GATEWAY.all("ServiceAccount") == []
    assert {pod["spec"]["serviceAccountName"] for _, pod in GATEWAY.pods()} == {"mine"}
    named = render("gpu", "serviceAccount.name=mine")
    assert named.of("ServiceAccount")["metadata"]["name"] == "mine"


def test_more_objects_are_templates():
    route = EVERYTHING.of("TLSRoute")
    coordinator = EVERYTHING.of("Service", "-coordinator")["metadata"]["name"]
    assert route["metadata"] == {"name": coordinator, "namespace": "rl"}
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": coordinator, "port": 50051}
    files = EVERYTHING.of("ConfigMap", "-files")
    assert files["data"]["openai"] == "pool-a-openai.rl.svc.corp.example"


def test_probes_take_what_is_set_and_keep_the_rest():
    def timings(rendered, server, probe):
        found = rendered.container(f"-{server}")[f"{probe}Probe"]
        return [found[key] for key in ("periodSeconds", "timeoutSeconds", "failureThreshold")]

    assert timings(EVERYTHING, "coordinator", "startup") == [2, 1, 300]
    assert timings(EVERYTHING, "coordinator", "readiness") == [2, 5, 3]
    assert timings(EVERYTHING, "replicas", "startup") == [10, 1, 360]
    assert timings(EVERYTHING, "replicas", "liveness") == [10, 10, 6]
    assert timings(PLAIN, "replicas", "startup") == [10, 1, 180]
    assert timings(PLAIN, "replicas", "readiness") == [2, 5, 1]


def test_the_tests_pod_may_run_where_the_replicas_do():
    assert EVERYTHING.pod("-test")["nodeSelector"] == {"pool": "gpu"}
    assert EVERYTHING.pod("-test")["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert not {"nodeSelector", "tolerations"} & PLAIN.pod("-test").keys()


# -- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rendered", "claim"), [(EVERYTHING, "downloads"), (GATEWAY, "weft-cache")], ids=str
)
def test_every_pod_that_downloads_does_so_to_the_shared_claim(rendered, claim):
    for name in ("-replicas", "-test"):
        container = rendered.container(name)
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "shared-cache"]
        assert by_name(container["env"])["HF_HOME"]["value"] == mount["mountPath"]
        volume = by_name(rendered.pod(name)["volumes"])["shared-cache"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim}
    assert "shared-cache" not in by_name(rendered.pod("-coordinator")["volumes"])


def test_the_shared_claim_is_made_unless_there_is_one():
    claim = GATEWAY.of("PersistentVolumeClaim", "-cache")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "300Gi"}},
    }
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert EVERYTHING.all("PersistentVolumeClaim") == []
    once = ["model.sharedCache.accessMode=ReadWriteOnce", "model.sharedCache.whenDeleted=Delete"]
    once += ["replicas.autoscaling.maxReplicas=1"]
    claim = render("gateway", *once).of("PersistentVolumeClaim", "-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "annotations" not in claim["metadata"]
    names = {variable["name"] for variable in PLAIN.container("-replicas")["env"]}
    assert "HF_HOME" not in names


def test_a_model_may_lie_on_a_volume_of_any_kind():
    image = {"image": {"reference": "registry.example/qwen:1", "pullPolicy": "IfNotPresent"}}
    rendered = render("gpu", model={"name": "/models/qwen", "volume": image})
    for name in ("-replicas", "-test"):
        container = rendered.container(name)
        assert {"name": "models"} | image in rendered.pod(name)["volumes"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in (
            container["volumeMounts"]
        )
        assert by_name(container["env"])["HF_HUB_OFFLINE"]["value"] == "1"


def test_variables_of_the_model_are_in_every_pod_that_loads_it():
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    tiny = render("cpu", model={"env": [proxy]})
    for pod in (EVERYTHING, tiny):
        for name in ("-replicas", "-test"):
            assert proxy in pod.container(name)["env"]
    (init,) = tiny.pod("-replicas")["initContainers"]
    assert proxy in init["env"]
    assert proxy not in EVERYTHING.container("-coordinator")["env"]


def test_variables_of_the_hub_may_be_given_where_the_chart_gives_none():
    secret = {"secretKeyRef": {"name": "hub", "key": "read-token"}}
    token = {"name": "HF_TOKEN", "valueFrom": secret}
    for model in ({"env": [token]}, {"env": [token, {"name": "HF_HUB_OFFLINE", "value": "1"}]}):
        rendered = render("gpu", model=model)
        for name in ("-replicas", "-test"):
            given = rendered.container(name)["env"]
            assert [variable for variable in model["env"] if variable in given] == model["env"]
    assert token in render("gpu", replicas={"env": [token]}).container("-replicas")["env"]
    online = {"name": "HF_HUB_OFFLINE", "value": "0"}
    rendered = render("tokens", model={"env": [online]})  # else offline, for a model of a volume
    for name in ("-replicas", "-test"):
        given = [v for v in rendered.container(name)["env"] if v["name"] == "HF_HUB_OFFLINE"]
        assert given == [online]


def test_an_init_container_runs_after_the_one_that_makes_the_model():
    own = {"name": "own", "image": "a:1"}
    rendered = render("cpu", 'replicas.initContainers=[{"name": "own", "image": "a:1"}]')
    assert [c["name"] for c in rendered.pod("-replicas")["initContainers"]] == ["model", "own"]
    assert own in rendered.pod("-replicas")["initContainers"]
    assert [c["name"] for c in rendered.pod("-test")["initContainers"]] == ["model"]


# -- who reaches it ------------------------------------------------------------------------------


def test_services_are_reached_as_is_asked_for():
    openai = EVERYTHING.of("Service", "-openai")
    assert openai["metadata"]["annotations"] == {"cloud.example/internal": "true"}
    expected = {
        "type": "LoadBalancer",
        "loadBalancerClass": "cloud.example/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
    }
    assert expected.items() <= openai["spec"].items()
    coordinator = EVERYTHING.of("Service", "-coordinator")
    assert coordinator["spec"]["type"] == "NodePort"
    assert coordinator["metadata"]["annotations"] == {"g": "h"}
    # The pods' own names stay inside.
    assert EVERYTHING.of("Service", "-replicas")["spec"]["clusterIP"] == "None"
    for name in ("-openai", "-coordinator"):
        service = PLAIN.of("Service", name)
        assert service["spec"].keys() == {"type", "selector", "ports"}
        assert service["spec"]["type"] == "ClusterIP"
        assert "annotations" not in service["metadata"]


def test_a_name_that_others_dial_is_in_the_certificate():
    names = {c["metadata"]["name"]: c["spec"]["dnsNames"] for c in EVERYTHING.all("Certificate")}
    assert names["pool-a-coordinator"][-1] == "weft.example.com"
    assert names["pool-a-replicas"][-1] == "llm.example.com"
    assert EVERYTHING.of("TLSRoute")["spec"]["hostnames"][0] in names["pool-a-coordinator"]
    assert not any("example.com" in str(c["spec"]["dnsNames"]) for c in PLAIN.all("Certificate"))


@pytest.mark.parametrize(
    ("rendered", "kind", "suffix"),
    [(EVERYTHING, "HTTPRoute", "-openai"), (GATEWAY, "GRPCRoute", "-coordinator")],
    ids=["http", "grpc"],
)
def test_a_route_leads_to_a_port_of_its_service(rendered, kind, suffix):
    route, service = rendered.of(kind), rendered.of("Service", suffix)
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == service["metadata"]["name"]
    ports = {port["port"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert ports[backend["port"]] == {"HTTPRoute": "http", "GRPCRoute": "grpc"}[kind]
    assert route["spec"]["parentRefs"][0]["name"] == "public"
    assert PLAIN.all(kind) == []


@pytest.mark.parametrize(
    ("rendered", "kind", "suffix", "pod"),
    [
        (EVERYTHING, "HTTPRoute", "-openai", "-replicas"),
        (GATEWAY, "GRPCRoute", "-coordinator", "-coordinator"),
    ],
    ids=["http", "grpc"],
)
def test_a_gateway_is_told_that_the_pods_speak_tls(rendered, kind, suffix, pod):
    policy = rendered.of("BackendTLSPolicy", suffix)
    (target,) = policy["spec"]["targetRefs"]
    service = rendered.of("Service", suffix)
    assert (target["kind"], target["name"]) == ("Service", service["metadata"]["name"])
    port = by_name(service["spec"]["ports"])[target["sectionName"]]
    assert port["port"] == rendered.of(kind)["spec"]["rules"][0]["backendRefs"][0]["port"]
    assert policy["spec"]["validation"]["caCertificateRefs"] == [
        {"group": "", "kind": "ConfigMap", "name": "pool-ca"}
    ]
    certificate = rendered.of("Certificate", pod)["spec"]["dnsNames"]
    assert policy["spec"]["validation"]["hostname"] in certificate
    assert PLAIN.all("BackendTLSPolicy") == []


@pytest.mark.parametrize("profile", PROFILES)
def test_ports_say_what_they_speak_in_words_of_kubernetes(profile):
    rendered = render(profile)
    for service in rendered.all("Service"):
        said = {p["name"]: p.get("appProtocol") for p in service["spec"]["ports"]}
        tls = {"grpc": profile != "cpu", "http": profile == "everything", "metrics": False}
        if service["spec"].get("type") == "LoadBalancer":  # Azure's would ask "/" for health
            assert set(said.values()) == {None}
            continue
        for name, word in said.items():
            plain = {"grpc": "kubernetes.io/h2c"}.get(name)
            assert word == ("https" if tls[name] else plain), name


def test_a_gateway_may_be_in_the_namespace_of_the_release():
    here = '[{"name": "public"}, {"name": "other", "namespace": "rl"}]'
    routes = [f"openai.httpRoute.parentRefs={here}", f"coordinator.grpcRoute.parentRefs={here}"]
    pods = '[{"podSelector": {"matchLabels": {"gateway": "public"}}}]'
    peers = [f"networkPolicy.{who}={pods}" for who in ("clients", "operators")]
    rendered = render("gateway", *routes, *peers)
    for suffix in ("-clients", "-operators"):
        (rule,) = rendered.of("NetworkPolicy", suffix)["spec"]["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"gateway": "public"}}}]


def test_a_route_of_http_passes_only_the_api_on_and_may_last():
    route = EVERYTHING.of("HTTPRoute")
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    assert route["metadata"]["annotations"] == {"e": "f"}
    (rule,) = route["spec"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/tokenize"]
    assert rule["timeouts"] == {"request": "0s"}
    (rule,) = GATEWAY.of("HTTPRoute")["spec"]["rules"]
    assert [match["path"] for match in rule["matches"]] == [{"type": "PathPrefix", "value": "/v1"}]
    assert "timeouts" not in rule
    assert "hostnames" not in GATEWAY.of("HTTPRoute")["spec"]
    assert "annotations" not in GATEWAY.of("HTTPRoute")["metadata"]


# -- how many, and how they are replaced ---------------------------------------------------------


def test_an_upgrade_goes_as_far_and_as_fast_as_is_asked_for():
    def update(rendered):
        strategy = rendered.of("StatefulSet")["spec"]["updateStrategy"]
        assert strategy["type"] == "RollingUpdate"
        return strategy["rollingUpdate"]

    assert update(EVERYTHING) == {"partition": 2, "maxUnavailable": 2}
    # Left out, because Kubernetes before 1.35 drops it, and who compares would see that.
    assert update(PLAIN) == {"partition": 0}
    assert update(render("gpu", "replicas.rollingUpdate.maxUnavailable=50%")) == {
        "partition": 0,
        "maxUnavailable": "50%",
    }


def test_keda_scales_where_it_has_triggers():
    scaled = GATEWAY.of("ScaledObject")["spec"]
    stateful = GATEWAY.of("StatefulSet")
    assert scaled["scaleTargetRef"]["name"] == stateful["metadata"]["name"]
    assert "replicas" not in stateful["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 8)
    assert scaled["triggers"] == values("gateway")["replicas"]["autoscaling"]["kedaTriggers"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 900
    assert GATEWAY.all("HorizontalPodAutoscaler") == []
    assert EVERYTHING.all("ScaledObject") == PLAIN.all("ScaledObject") == []


def test_options_of_the_programs_are_given_where_they_are_set():
    assert "--vllm-defaults" in args(EVERYTHING.container("-replicas"))
    assert "--vllm-defaults" not in args(PLAIN.container("-replicas"))
    few = render("gpu", "coordinator.maxPoliciesPerTrainer=3")
    assert args(few.container("-coordinator"))["--max-policies-per-trainer"] == "3"


# -- several pools -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("qwen", "llama"), ("weft", "weft-coordinator"), ("weft", "weft-2")]
)
@pytest.mark.parametrize("profile", ["gpu", "gateway"])
def test_two_releases_in_one_namespace_share_nothing(profile, first, second):
    one, two = render(profile, release=first), render(profile, release=second)
    assert not one.made() & two.made()
    assert len(one.made()) == len(two.made()) > 15
    labels = [pod["metadata"]["labels"].items() for _, pod in two.pods()]
    selectors = [r["spec"]["selector"] for r in one.all("Service")]
    selectors += [r["spec"]["podSelector"]["matchLabels"] for r in one.all("NetworkPolicy")]
    selectors += [r["spec"]["selector"]["matchLabels"] for r in one.all("PodDisruptionBudget")]
    assert len(selectors) > 4
    assert not any(selector.items() <= found for selector in selectors for found in labels)
    for rendered in (one, two):
        dialled = args(rendered.container("-replicas"))["--coordinator"]
        assert ("Service", dialled.partition(".")[0]) in rendered.made()


# -- what is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
def test_no_place_of_the_charts_own_may_be_taken(server):
    """The refusals name each volume and each place that a server's pod has in any profile."""
    volumes, paths = set(), set()
    for profile in PROFILES:
        pod = render(profile, f"{server}.extraVolumes=[]", f"{server}.extraVolumeMounts=[]")
        mounts = pod.container(f"-{server}")["volumeMounts"]
        volumes |= {mount["name"] for mount in mounts}
        paths |= {mount["mountPath"] for mount in mounts}
    assert len(volumes) == len(paths) > 4
    taken = {
        "extraVolumes": [{"name": name, "emptyDir": {}} for name in volumes],
        "extraVolumeMounts": [{"name": "a", "mountPath": path} for path in paths],
    }
    with pytest.raises(RefusedError) as refusal:
        render("cpu", **{server: taken})
    refused = set(re.findall(r"the (?:name|mountPath) (\S+) is taken", str(refusal.value)))
    assert refused == volumes | paths
