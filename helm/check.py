"""Checks of the chart; run by helm/check.sh. Prints what fails, then `N passed, N failed`."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import helm_python as helm
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).parent
CHART = ROOT / "damask"
BINARY = pathlib.Path(os.environ.get("DAMASK_BIN", ROOT.parent / "target/release/damask"))
# The oldest release that the chart takes, the first one with DRA, the newest one with schemas.
KUBERNETES = ["1.30", "1.34", "1.37"]
# No Kubernetes schema knows these.
CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule"}

passed, failed = 0, 0


def check(name, function, *args):
    global passed, failed
    try:
        function(*args)
        passed += 1
    except Exception as error:  # each failure is told, none ends the run
        failed += 1
        print(f"FAILED: {name}: {error}")


def require(condition, message):
    if not condition:
        raise AssertionError(message)


def render(chart, values):
    documents = []
    for path, text in chart.render(values, name="demo", namespace="prod").items():
        if path.endswith(".yaml"):
            documents += [document for document in yaml.safe_load_all(text) if document]
    return documents


def named(document):
    return f"{document['kind']} {document['metadata']['name']}"


def pod_of(document):
    if document["kind"] == "Pod":
        return document["metadata"], document["spec"]
    if document["kind"] in ("Deployment", "StatefulSet"):
        template = document["spec"]["template"]
        return template["metadata"], template["spec"]
    return None


def lint(values):
    report = helm.lint(CHART, values, strict=True, namespace="prod")
    problems = [message["error"] for message in report["messages"] if message["severity"] >= 2]
    require(not problems and not report["errors"], f"{problems} {report['errors']}")


def schemas(documents, version):
    if version == "1.30" and any(document["kind"] == "ResourceClaimTemplate" for document in documents):
        return  # the chart refuses DRA there: refused_by_version
    for document in documents:
        if document["kind"] in CUSTOM_KINDS:
            continue
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            raise AssertionError(f"{named(document)}: {path}: {error.message}") from error


def policy(document):
    metadata, spec = pod_of(document)
    security = spec["securityContext"]
    require(security["runAsNonRoot"] and security["runAsUser"] > 0, "runs as root")
    require(security["seccompProfile"]["type"] == "RuntimeDefault", "no seccomp profile")
    require(spec["automountServiceAccountToken"] is False, "mounts an account's token")
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        require(not spec.get(key), key)
    for container in spec["containers"]:
        container_policy(container, document["kind"] == "Pod")
    if document["kind"] != "Pod":
        pre_stop = max(c.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for c in spec["containers"])
        drain_s = {drain_seconds(container) for container in spec["containers"]}
        require(len(drain_s) == 1, f"time to drain: {drain_s}")
        # `damask node` drains its workers in turn; each has a health port.
        in_turn = max(sum(p["name"].endswith("-adm") for p in c["ports"]) if "node" in c["args"] else 1 for c in spec["containers"])
        require(spec["terminationGracePeriodSeconds"] > pre_stop + in_turn * drain_s.pop(), "killed before it can have drained")
        require(metadata["annotations"]["checksum/config"], "a changed config would not reach the pod")


def drain_seconds(container):
    return int(next(v["value"] for v in container["env"] if v["name"] == "DAMASK_DRAIN_GRACE_S"))


def container_policy(container, is_test):
    name = container["name"]
    security = container["securityContext"]
    require(security["allowPrivilegeEscalation"] is False, f"{name}: privilege escalation")
    require(security["readOnlyRootFilesystem"] is True, f"{name}: writable root")
    require(security["capabilities"]["drop"] == ["ALL"], f"{name}: capabilities kept")
    require(set(security["capabilities"].get("add", [])) <= {"SYS_NICE"}, f"{name}: capabilities added")
    require("memory" in container["resources"]["limits"], f"{name}: no memory limit")
    require({"cpu", "memory"} <= set(container["resources"]["requests"]), f"{name}: no requests")
    tag = container["image"].rsplit("/", 1)[-1].partition("@")[2] or container["image"].rsplit("/", 1)[-1].partition(":")[2]
    require(tag and tag != "latest", f"{name}: image {container['image']} names no version")
    if not is_test:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            require(probe in container, f"{name}: no {probe}")


def references(documents):
    """Whatever an object names must exist; whatever selects pods must find some."""
    by_kind = {}
    for document in documents:
        names = by_kind.setdefault(document["kind"], {})
        require(document["metadata"]["name"] not in names, f"{named(document)} twice")
        names[document["metadata"]["name"]] = document
    pods = [pod_of(document) for document in documents if pod_of(document)]
    ports = {}
    for metadata, spec in pods:
        component = metadata["labels"]["app.kubernetes.io/component"]
        container_ports = [port for container in spec["containers"] for port in container.get("ports", [])]
        ports[component] = {port["name"] for port in container_ports} | {port["containerPort"] for port in container_ports}
        require(len({port["containerPort"] for port in container_ports}) == len(container_ports), f"{component}: a port twice")
        require(spec["serviceAccountName"] in by_kind["ServiceAccount"], spec["serviceAccountName"])
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for volume in volumes.values():
            if "configMap" in volume:
                require(volume["configMap"]["name"] in by_kind["ConfigMap"], volume)
        for container in spec["containers"]:
            for mount in container.get("volumeMounts", []):
                require(mount["name"] in volumes, f"{container['name']} mounts {mount['name']}")

    def selected(labels):
        found = [m["labels"]["app.kubernetes.io/component"] for m, _ in pods if labels.items() <= m["labels"].items()]
        require(found, f"{labels} selects no pod")
        return found[0]

    for service in by_kind["Service"].values():
        component = selected(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            require(target in ports[component], f"{named(service)}: {component} has no port {target}")
    for kind in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
        for document in by_kind.get(kind, {}).values():
            selected(document["spec"]["selector"]["matchLabels"])
    for scaler in by_kind.get("HorizontalPodAutoscaler", {}).values():
        target = by_kind["Deployment"][scaler["spec"]["scaleTargetRef"]["name"]]
        require("replicas" not in target["spec"], f"{named(target)}: an upgrade would undo the autoscaler")
    for monitor in by_kind.get("ServiceMonitor", {}).values():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in by_kind["Service"].values() if labels <= s["metadata"]["labels"].items()]
        require(len(services) == 1, f"{named(monitor)} selects {len(services)} services")
        offered = {port["name"] for port in services[0]["spec"]["ports"]}
        require({endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == offered, named(monitor))
    network(by_kind, ports, selected)


def network(by_kind, ports, selected):
    """Every port that a policy speaks of exists, and every pod's port is spoken of: a forgotten one would be cut off."""
    for network_policy in by_kind.get("NetworkPolicy", {}).values():
        component = selected(network_policy["spec"]["podSelector"]["matchLabels"])
        allowed = {port["port"] for rule in network_policy["spec"]["ingress"] for port in rule["ports"]}
        own = {port for port in ports[component] if isinstance(port, int)}
        require(allowed == own, f"{named(network_policy)}: ingress {sorted(allowed)}, ports {sorted(own)}")
        for rule in network_policy["spec"]["egress"]:
            for peer in rule["to"]:
                if "podSelector" in peer:
                    target = ports[selected(peer["podSelector"]["matchLabels"])]
                    require({port["port"] for port in rule["ports"]} <= target, f"{named(network_policy)}: egress {rule}")


def gateway_keys(documents):
    """The gateway knows every setting: what it does not know it would refuse. Needs no binary, unlike `service_configs`."""
    known = set(re.findall(r"(?m)^    pub (\w+):", (ROOT.parent / "services/gateway/src/config.rs").read_text()))
    texts = [d["data"]["gateway.yaml"] for d in documents if d["kind"] == "ConfigMap" and "gateway.yaml" in d["data"]]
    require(len(texts) == 1, f"{len(texts)} files gateway.yaml")
    keys = set(yaml.safe_load(texts[0]))
    require(keys <= known, f"{sorted(keys - known)} are no settings of the gateway")


def service_configs(documents):
    """The services themselves accept the files, with their containers' environment."""
    configs = {name: text for d in documents if d["kind"] == "ConfigMap" for name, text in d["data"].items() if name.endswith(".yaml")}
    node = yaml.safe_load(configs.pop("node.yaml", "workers: []"))
    for worker in node["workers"]:
        require(pathlib.Path(worker["config"]).name in configs, f"node.yaml: {worker}")
    roles = {"gateway.yaml": "gateway", "router.yaml": "router"}
    roles |= {name: "decode" if "kv_listen" in yaml.safe_load(text) else "prefill" for name, text in configs.items() if name not in roles}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in configs.items():
            path = pathlib.Path(folder, name)
            path.write_text(text)
            role = roles[name]
            environment = {f"DAMASK_{role.upper()}__NAME": "demo-damask-workers-0-x", "POD_IP": "10.0.0.1"}
            if role in ("gateway", "router"):
                environment = {"DAMASK_GATEWAY__API_KEYS": json.dumps([{"name": "alice", "sha256": "0" * 64}])}
            result = subprocess.run([BINARY, "config", "check", role, path], env=environment, capture_output=True, text=True)
            require(result.returncode == 0, f"{name}: {result.stderr}")


STORE = {"responses_store": {"file": "/data/responses.redb", "keep_hours": 24}}
GPU = {"accelerator": "nvidia", "gpusPerPod": 2}
REFUSED = [
    ({"gatway": {}}, "gatway"),
    ({"gateway": {"replica": 1}}, "replica"),
    ({"image": {"tag": "latest"}}, "tag"),
    ({"router": {"resources": {"limits": {"cpu": "1", "memory": None}}}}, "memory"),
    ({"workers": {"terminationGracePeriodSeconds": 10}}, "terminationGracePeriodSeconds"),
    ({"gateway": {"persistence": {"enabled": True}}}, "runs as one replica"),
    ({"gateway": {"config": STORE}}, "runs as one replica"),
    ({"gateway": {"replicas": 1, "persistence": {"enabled": True}, "autoscaling": {"enabled": True}}}, "runs as one replica"),
    ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.host"),
    ({"model": {"source": "/models/gpt-oss-20b"}}, "must come from a volume"),
    ({"model": {"source": "gpt-oss-20b"}}, "source"),
    ({"workers": {"processes": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "prefill"}]}}, "at least one prefill and one decode"),
    ({"workers": {"processes": [{"name": "a", "role": "prefill"}, {"name": "a", "role": "decode"}]}}, "two are called a"),
    ({"workers": {"processes": [{"name": "p", "role": "prefill", "gpus": [0]}, {"name": "d", "role": "decode"}]}}, "without workers.accelerator"),
    ({"workers": GPU | {"processes": [
        {"name": "p", "role": "prefill", "gpus": [0], "config": {"layout": {"tp": 2}}},
        {"name": "d", "role": "decode", "gpus": [1], "config": {"layout": {"tp": 1}}}]}}, "tp x dp is 2, but it has 1 gpus"),
    ({"workers": GPU | {"processes": [
        {"name": "p", "role": "prefill", "gpus": [0], "config": {"layout": {"tp": 1}}},
        {"name": "d", "role": "decode", "gpus": [2], "config": {"layout": {"tp": 1}}}]}}, "there is no GPU 2 among 2"),
    ({"workers": GPU | {"processes": [
        {"name": "p", "role": "prefill", "gpus": [0], "config": {"layout": {"tp": 1}}},
        {"name": "node", "role": "decode", "gpus": [1], "config": {"layout": {"tp": 1}}}]}}, "none may be called node"),
]


def refused(chart, values, reason):
    try:
        chart.render(values, name="demo", namespace="prod")
    except helm.HelmError as error:
        require(reason in str(error), f"refused for another reason: {error}")
    else:
        raise AssertionError("accepted")


def refused_by_version():
    """Only lint can be told a version, and lint passes a template's `fail` to the log on standard error."""
    values = yaml.safe_load((CHART / "examples/node-8xh200-dra.yaml").read_text())
    for version, is_refused in (("v1.33.0", True), ("v1.34.0", False)):
        log = logged(lambda version=version: helm.lint(CHART, values, kube_version=version))
        require(("dra needs Kubernetes 1.34" in log) == is_refused, f"{version}: {log}")


def logged(function):
    """What `function`, native code included, writes to standard error."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            function()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def schema_covers_values(values, schema, path="values"):
    """A default that the schema does not describe could not be set by anybody."""
    for key, value in values.items():
        require(key in schema["properties"], f"{path}.{key} is not in the schema")
        inner = schema["properties"][key]
        if isinstance(value, dict) and "properties" in inner:
            schema_covers_values(value, inner, f"{path}.{key}")
    for key in schema["properties"]:
        require(key in values or key == "global", f"{path}.{key} has no default")


def main():
    chart = helm.Chart.load(CHART)
    defaults = chart.values
    check("schema and defaults", schema_covers_values, defaults, json.loads((CHART / "values.schema.json").read_text()))
    files = sorted((CHART / "examples").glob("*.yaml"))
    require(files, "no examples")
    with_store = {"gateway": {"replicas": 1, "persistence": {"enabled": True}, "config": STORE}}
    examples = {"defaults": {}, "a gateway with a store": with_store} | {file.stem: yaml.safe_load(file.read_text()) for file in files}
    for name, values in examples.items():
        check(f"{name}: lint", lint, values)
        try:
            documents = render(chart, values)
        except Exception as error:
            check(f"{name}: rendering", require, False, error)
            continue
        for version in KUBERNETES:
            check(f"{name}: schemas of Kubernetes {version}", schemas, documents, version)
        for document in filter(pod_of, documents):
            check(f"{name}: policy: {named(document)}", policy, document)
        check(f"{name}: references", references, documents)
        check(f"{name}: keys of gateway.yaml", gateway_keys, documents)
        if BINARY.exists():
            check(f"{name}: service configs", service_configs, documents)
    for values, reason in REFUSED:
        check(f"refused: {values}", refused, chart, values, reason)
    check("refused by version: DRA before Kubernetes 1.34", refused_by_version)
    if not BINARY.exists():
        print(f"SKIPPED: service configs are not checked, {BINARY} has not been built")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
