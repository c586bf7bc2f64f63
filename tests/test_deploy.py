"""deploy/: the manifests have the fields Kubernetes asks for, and name only flags, paths and variables that exist."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from dsuf.cli.app import app
from dsuf.cli.serve import serve
from dsuf.config import ENVIRONMENT_NAMES
from dsuf.server.routes import routes

ROOT = Path(__file__).parents[1]
MANIFESTS = ROOT / "deploy" / "kubernetes.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
DOCUMENTS = list(yaml.safe_load_all(MANIFESTS.read_text()))
COMMANDS = typer.main.get_command(app).commands


class Maybe(str):
    """A key that may be absent."""


class Choice(tuple):
    """One of these values."""


# A type, a Choice, [what each of a list is], {key: what its value is} or {str: what all values are}. A key that is not
# listed is an error, as it is for the API server with strict validation: a misspelt field would be dropped in silence.
METADATA = {"name": str}
LABELS = {str: str}
SELECTOR = {"matchLabels": LABELS}
AMOUNTS = {str: (str, int)}
PROBE = {
    Maybe("httpGet"): {"path": str, "port": (str, int)},
    Maybe("tcpSocket"): {"port": (str, int)},
    Maybe("periodSeconds"): int,
    Maybe("timeoutSeconds"): int,
    Maybe("failureThreshold"): int,
}
SOURCE = {Maybe("fieldRef"): {"fieldPath": str}, Maybe("secretKeyRef"): {"name": str, "key": str}}
CONTAINER = {
    "name": str,
    "image": str,
    Maybe("command"): [str],
    "args": [str],
    "env": [{"name": str, Maybe("value"): str, Maybe("valueFrom"): SOURCE}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
    "securityContext": {
        "runAsUser": int,
        Maybe("runAsNonRoot"): bool,
        "capabilities": {"drop": [str], Maybe("add"): [str]},
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "seccompProfile": {"type": Choice(["RuntimeDefault"])},
    },
    Maybe("startupProbe"): PROBE,
    "readinessProbe": PROBE,
    Maybe("livenessProbe"): PROBE,
    Maybe("lifecycle"): {"preStop": {"exec": {"command": [str]}}},
    Maybe("volumeMounts"): [{"name": str, "mountPath": str, Maybe("readOnly"): bool}],
}
VOLUME = {
    "name": str,
    Maybe("secret"): {"secretName": str, "defaultMode": int, "items": [{"key": str, "path": str}]},
    Maybe("emptyDir"): {Maybe("medium"): Choice(["Memory"]), Maybe("sizeLimit"): str},
}
POD = {
    Maybe("hostNetwork"): bool,
    Maybe("dnsPolicy"): Choice(["ClusterFirstWithHostNet"]),
    Maybe("enableServiceLinks"): bool,
    "automountServiceAccountToken": bool,
    Maybe("terminationGracePeriodSeconds"): int,
    Maybe("affinity"): {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": str, "labelSelector": SELECTOR}]
        }
    },
    "containers": [CONTAINER],
    Maybe("volumes"): [VOLUME],
}
SPECS = {
    ("apps/v1", "Deployment"): {
        "replicas": int,
        Maybe("progressDeadlineSeconds"): int,
        "selector": SELECTOR,
        Maybe("strategy"): {
            "type": Choice(["RollingUpdate"]),
            "rollingUpdate": {"maxSurge": int, "maxUnavailable": int},
        },
        "template": {"metadata": {"labels": LABELS}, "spec": POD},
    },
    ("v1", "Service"): {"selector": LABELS, "ports": [{"name": str, "port": int, "targetPort": (str, int)}]},
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable": int, "selector": SELECTOR},
}


def faults(found, expected, where):
    """What of a document is not as the schema above says."""
    if isinstance(expected, Choice):
        return [] if found in expected else [f"{where} is {found!r}"]
    if isinstance(expected, list):
        if not isinstance(found, list):
            return [f"{where} is no list"]
        return [fault for i, item in enumerate(found) for fault in faults(item, expected[0], f"{where}[{i}]")]
    if not isinstance(expected, dict):
        right = isinstance(found, expected) and (expected is bool or not isinstance(found, bool))
        return [] if right else [f"{where} is {found!r}"]
    if not isinstance(found, dict):
        return [f"{where} is no mapping"]
    if str in expected:
        expected = dict.fromkeys(found, expected[str])
    missing = [f"{where} has no {key}" for key in expected if key not in found and not isinstance(key, Maybe)]
    surplus = [f"{where} has {key}" for key in found if key not in expected]
    known = [key for key in found if key in expected]
    return missing + surplus + [f for key in known for f in faults(found[key], expected[key], f"{where}.{key}")]


def named(kind, name):
    (document,) = (d for d in DOCUMENTS if d["kind"] == kind and d["metadata"]["name"] == name)
    return document


def pods():
    return [d["spec"]["template"] for d in DOCUMENTS if d["kind"] == "Deployment"]


def containers():
    return [container for pod in pods() for container in pod["spec"]["containers"]]


POD_OF_DSUF = named("Deployment", "dsuf")["spec"]["template"]["spec"]
(SERVER,) = POD_OF_DSUF["containers"]
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text())).splitlines()
    if line.strip()
]


def told(word):
    """Arguments of each instruction of the Dockerfile with that word."""
    return [rest for name, rest in INSTRUCTIONS if name == word]


def flags_of(command):
    return {name: option for option in COMMANDS[command].params for name in option.opts}


def assert_command_exists(words):
    """`words` after `dsuf`: a command, with flags that it has, and values of their type."""
    command, *arguments = words
    with COMMANDS[command].make_context(command, list(arguments)):  # click refuses what it does not know
        pass
    assert [word for word in arguments if word.partition("=")[0] not in flags_of(command)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_every_field_exists_has_its_type_and_none_is_missing(document):
    spec = SPECS[document["apiVersion"], document["kind"]]
    schema = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": spec}
    assert faults(document, schema, document["kind"]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replicas": "2"}, "Deployment.replicas is '2'"),
        ({"replica": 2}, "Deployment has replica"),
        ({"selector": {}}, "Deployment.selector has no matchLabels"),
        ({"template": None}, "Deployment.template is no mapping"),
        ({"strategy": {"type": "OnDelete", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": True}}}, "OnDelete"),
    ],
)
def test_the_schema_sees_what_is_wrong(change, said):
    spec = named("Deployment", "dsuf")["spec"] | change
    assert any(said in fault for fault in faults(spec, SPECS["apps/v1", "Deployment"], "Deployment"))


def test_selectors_meet_labels_and_ports_and_volumes_meet_their_names():
    labels = [pod["metadata"]["labels"] for pod in pods()]
    for document in DOCUMENTS:
        selector = document["spec"]["selector"]
        assert selector.get("matchLabels", selector) in labels
    for service in (d for d in DOCUMENTS if d["kind"] == "Service"):
        (pod,) = (p for p in pods() if p["metadata"]["labels"] == service["spec"]["selector"])
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    mounts = {mount["name"] for mount in SERVER["volumeMounts"]}
    assert mounts == {volume["name"] for volume in POD_OF_DSUF["volumes"]}


def test_every_argument_of_the_server_exists():
    assert_command_exists(SERVER["args"])


@pytest.mark.parametrize("wrong", [["serve", "--kv-keyfile=x"], ["serve", "--port=many"], ["drain", "x"]])
def test_an_argument_that_does_not_exist_is_seen(wrong):
    with pytest.raises(Exception, match=r"(?i)no such option|valid int|unexpected extra"):
        assert_command_exists(wrong)


def test_flags_in_comments_exist_too():
    comments = re.findall(r"#.*", MANIFESTS.read_text())
    flags = {flag for line in comments for flag in re.findall(r"--[a-z][a-z-]+", line)}
    assert {flag for flag in flags if not flag.startswith("--from-")} - set(flags_of("serve")) == set()


def test_the_pod_is_drained_before_it_is_stopped_and_given_the_time_for_it():
    program, *words = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, words[0]) == ("dsuf", "drain")
    assert_command_exists(words)
    given = dict(word.partition("=")[::2] for word in SERVER["args"][1:])
    defaults = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    waits = [
        float(given.get(f"--{name.replace('_', '-')}", defaults[name])) for name in ("drain_delay", "drain_timeout")
    ]
    assert POD_OF_DSUF["terminationGracePeriodSeconds"] == 150 >= sum(waits) + 20


def test_probes_ask_paths_that_the_server_has_on_the_port_it_listens_on():
    gets = {route.path for route in routes() if "GET" in route.methods}
    asked = {kind: SERVER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in asked.values()} <= gets
    assert {kind: probe["path"] for kind, probe in asked.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert {probe["port"] for probe in asked.values()} == {"http"}
    assert f"--port={ports['http']}" in SERVER["args"]
    assert f"--kv-listen=$(POD_IP):{ports['kv']}" in SERVER["args"]


def test_variables_are_read_by_dsuf_or_by_the_manifest_and_are_set_before_they_are_used():
    for container in containers():
        texts = container.get("command", []) + container["args"]
        used = set(re.findall(r"\$\((\w+)\)", " ".join(texts)))
        known = set()
        for variable in container["env"]:
            needed = set(re.findall(r"\$\((\w+)\)", variable.get("value", "")))
            assert needed <= known, variable
            used |= needed
            known.add(variable["name"])
        assert used <= known
        assert known - used <= set(ENVIRONMENT_NAMES)
    # a Service called dsuf would put DSUF_PORT and others into the environment
    assert POD_OF_DSUF["enableServiceLinks"] is False


def test_the_fleet_key_is_a_secret_file_that_only_its_reader_may_read():
    (path,) = (word.partition("=")[2] for word in SERVER["args"] if word.startswith("--kv-key-file="))
    (mount,) = (m for m in SERVER["volumeMounts"] if Path(path).parent == Path(m["mountPath"]))
    (volume,) = (v for v in POD_OF_DSUF["volumes"] if v["name"] == mount["name"])
    assert Path(path).name in {item["path"] for item in volume["secret"]["items"]}
    assert volume["secret"]["defaultMode"] & 0o037 == 0  # as dsuf/kv/keys.py demands
    secrets = [v["valueFrom"]["secretKeyRef"] for c in containers() for v in c["env"] if "secretKeyRef" in str(v)]
    made = set(re.findall(r"--from-(?:file|literal)=([\w.-]+)", MANIFESTS.read_text()))
    assert {secret["key"] for secret in secrets} | {volume["secret"]["items"][0]["key"]} == made
    assert {secret["name"] for secret in secrets} == {volume["secret"]["secretName"]} == {"dsuf"}


def test_the_server_may_lock_its_memory_has_the_device_and_room_for_the_caches():
    context, limits = SERVER["securityContext"], SERVER["resources"]["limits"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert context["runAsUser"] == 0  # to others an added capability is not given
    assert [name for name in limits if name.startswith("rdma/")]
    assert f"--kv-host-bytes={limits['hugepages-2Mi'].removesuffix('Gi')}g" in SERVER["args"]
    assert not {"hostIPC", "hostPID"} & set(POD_OF_DSUF)
    assert "/dev/shm" not in {mount["mountPath"] for mount in SERVER["volumeMounts"]}


def test_folders_that_the_image_writes_to_are_mounted():
    environment = dict(pair.split("=", 1) for line in told("ENV") for pair in shlex.split(line))
    assert {name for name in environment if name.startswith("DSUF_")} <= set(ENVIRONMENT_NAMES)
    assert {"/tmp", environment["DSUF_CACHE"]} <= {mount["mountPath"] for mount in SERVER["volumeMounts"]}


def test_the_image_starts_a_command_that_exists_and_not_as_root():
    entry, command = (json.loads(told(word)[-1]) for word in ("ENTRYPOINT", "CMD"))
    assert entry == ["dsuf"]
    assert_command_exists(command)
    assert f"--port={told('EXPOSE')[-1]}" in command
    assert told("USER")[-1] in " ".join(told("RUN"))


def test_the_image_has_what_the_wheel_is_made_of_and_pyverbs_of_the_distribution():
    copied = {source for line in told("COPY") if not line.startswith("--from") for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    assert copied == {"pyproject.toml", "README.md", "recipes", "dsuf"}
    assert {line.split()[0] for line in told("FROM")} == {"debian:12-slim"}
    run, guide = " ".join(told("RUN")), (ROOT / "docs" / "kv.md").read_text()
    for words in ("python3-pyverbs ibverbs-providers", "ln -s /usr/lib/python3/dist-packages/pyverbs "):
        assert words in run
        assert words in guide


def test_the_readme_says_where_they_are():
    readme = (ROOT / "README.md").read_text()
    assert "deploy/kubernetes.yaml" in readme
    assert "deploy/Dockerfile" in readme
