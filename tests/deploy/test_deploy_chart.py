"""The Helm chart, rendered by Helm: its examples are valid for Kubernetes, and invalid values are refused."""

from __future__ import annotations

import copy
import json

import pytest
import yaml
from deployed import CHART, DEPLOY, EXAMPLES, HELM, chart_daemon, helm, pods, rendered

import kvstore
from kvstore.process.memory.memory_sizing import block_table_memory

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="requirements-deploy.txt is not installed")
pytestmark = pytest.mark.skipif(not HELM.exists(), reason="no helm beside this Python: scripts/fetch_helm.py")

KUBERNETES = ("1.27", "1.37")
"""The oldest version that the chart accepts, and the newest with published schemas."""
OPERATOR = "monitoring.coreos.com/v1"


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint_finds_nothing(example: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(CHART / "examples" / f"{example}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_manifests_are_valid_for_kubernetes(example: str) -> None:
    documents = rendered(example)
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        for version in KUBERNETES if document["apiVersion"] != OPERATOR else ():
            kubernetes_validate.validate(document, version, strict=True)


def test_validation_wrong_manifest_is_found() -> None:
    (metadata,) = (copy.deepcopy(one) for one in rendered("plain") if one["kind"] == "StatefulSet")
    container = metadata["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(metadata, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("example", EXAMPLES)
def test_selectors_match_pods(example: str) -> None:
    documents = rendered(example)
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in pods(documents)]
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            selector = spec["selector"]
        elif document["kind"] in {"NetworkPolicy", "PodDisruptionBudget"}:
            selector = spec.get("podSelector", spec.get("selector"))["matchLabels"]
        else:
            continue
        assert any(selector.items() <= one.items() for one in labels), document["metadata"]["name"]
    for workload in pods(documents):
        pod = workload["spec"]["template"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_have_minimal_rights(example: str) -> None:
    for workload in pods(rendered(example)):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is (pod["securityContext"]["runAsUser"] != 0)
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert "memory" in container["resources"]["limits"]
            added = set(security["capabilities"].get("add", []))
            assert added <= ({"IPC_LOCK"} if container in pod["containers"] else {"CHOWN", "DAC_OVERRIDE", "FOWNER"})


@pytest.mark.parametrize("example", EXAMPLES)
def test_chart_node_memory_and_stop_time_suffice(example: str) -> None:
    for workload in pods(rendered(example)):
        pod = workload["spec"]["template"]["spec"]
        if workload["kind"] != "DaemonSet":
            continue
        config = chart_daemon(workload).config.node
        limits = pod["containers"][0]["resources"]["limits"]
        memory = int(limits["memory"].removesuffix("Mi")) << 20
        if config.huge_pages:
            assert int(limits["hugepages-2Mi"].removesuffix("Mi")) << 20 == config.dram_bytes
        else:
            assert "hugepages-2Mi" not in limits
            assert memory > config.dram_bytes
        assert pod["terminationGracePeriodSeconds"] * 1_000 == config.stop_grace_ms + 30_000
        assert workload["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.parametrize("example", EXAMPLES)
def test_chart_memory_holds_the_index_of_a_full_node(example: str) -> None:
    for workload in pods(rendered(example)):
        if workload["kind"] != "DaemonSet":
            continue
        config = chart_daemon(workload).config.node
        limit = workload["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
        arena = 0 if config.huge_pages else config.dram_bytes
        beside = (int(limit.removesuffix("Mi")) << 20) - arena
        index = block_table_memory(config.dram_bytes, sum(volume.capacity_bytes for volume in config.nvme))
        assert index <= beside < index + (1 << 20)


def test_chart_memory_overhead_and_block_size_are_heeded() -> None:
    limits = []
    for setting in ("node.memoryOverhead=4GiB", "node.blockSize=16MiB"):
        (node,) = (one for one in rendered("plain", "--set", setting) if one["kind"] == "DaemonSet")
        limits.append(node["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])
    sized = block_table_memory(4 << 30, 50 << 30, 16 << 20)
    assert limits == ["8192Mi", f"{4096 + -(-sized // (1 << 20))}Mi"]


def test_chart_claim_holds_the_index() -> None:
    for example in EXAMPLES:
        (metadata,) = (one for one in pods(rendered(example)) if one["metadata"]["name"].endswith("-metadata"))
        if chart_daemon(metadata).valkey_servers:
            assert "volumeClaimTemplates" not in metadata["spec"]
            continue
        (claim,) = metadata["spec"]["volumeClaimTemplates"]
        size = claim["spec"]["resources"]["requests"]["storage"]
        assert size.endswith("Gi")
        assert int(size.removesuffix("Gi")) << 30 > chart_daemon(metadata).config.metadata.index_size_bytes


def test_tls_reaches_every_process_and_its_probes() -> None:
    for workload in pods(rendered("tls")):
        daemon = chart_daemon(workload)
        config = daemon.config
        own = {"metadata": config.metadata.tls, "node": config.node.tls}
        used = own.get(daemon.arguments[0], config.client.tls)
        mounted = [mount["mountPath"] for mount in daemon.about["volumeMounts"] if mount["name"] == "tls"]
        assert [str(path.parent) for path in (used.ca, used.cert, used.key)] == mounted * 3
        if daemon.arguments[0] == "admin":
            assert [str(path.parent) for path in (config.admin.tls.cert, config.admin.tls.key)] == mounted * 2
            assert {daemon.about[kind]["httpGet"]["scheme"] for kind in ("readinessProbe", "livenessProbe")} == {"HTTPS"}
        elif daemon.arguments[0] != "router":
            assert used.require_client_cert
            assert daemon.about["livenessProbe"]["exec"]["command"] == ["kvstore", "health", daemon.arguments[0]]


def test_chart_pool_inherits_and_settings_override() -> None:
    arguments = ("--set-string", "node.settings.node\\.policy=lru", "--set", "pools.all.settings.node\\.prefault=false")
    (node,) = (one for one in rendered("plain", *arguments) if one["kind"] == "DaemonSet")
    config = chart_daemon(node).config.node
    assert (config.policy, config.prefault, config.dram_bytes) == ("lru", False, 4 << 30)
    arguments = ("--set", "settings.node\\.prefault=false")
    (node,) = (one for one in rendered("plain", *arguments) if one["kind"] == "DaemonSet")
    assert chart_daemon(node).config.node.prefault is False


@pytest.mark.parametrize(("example", "limited"), [("plain", ["Ingress", "Egress"]), ("rdma", ["Ingress"])])
def test_chart_admin_server_admits_named_clients_only(example: str, limited: list[str]) -> None:
    """Labels do not match nodes on the hosts' network, so the policy admits them by port."""
    documents = rendered(example, "--set", "admin.enabled=true", "--set", "admin.tokensSecretName=tokens")
    (workload,) = (one for one in pods(documents) if one["metadata"]["name"].endswith("-admin"))
    daemon = chart_daemon(workload)
    assert daemon.config.admin.tokens_file is not None
    assert str(daemon.config.admin.tokens_file.parent) in daemon.secrets
    assert {daemon.about[kind]["httpGet"]["scheme"] for kind in ("readinessProbe", "livenessProbe")} == {"HTTP"}
    policies = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "NetworkPolicy"}
    policy = policies["kv-kvstore-admin"]
    assert (policy["policyTypes"], policy["ingress"]) == (limited, [])
    assert ("egress" in policy) == ("Egress" in limited)
    for document in documents:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(("example", "limited"), [("plain", True), ("tls", True), ("rdma", False), ("large", False)])
def test_chart_metadata_server_may_probe_every_node(example: str, limited: bool) -> None:
    """Without a way to the nodes, every silent node would be reported as unreachable."""
    documents = rendered(example)
    policies = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "NetworkPolicy"}
    policy = policies["kv-kvstore-metadata"]
    assert (policy["policyTypes"], "egress" in policy) == (["Ingress", "Egress"] if limited else ["Ingress"], limited)
    for workload in pods(documents):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        reached = [
            peer["podSelector"]["matchLabels"].items() <= labels.items()
            for rule in policy.get("egress", [])
            if "ports" not in rule
            for peer in rule["to"]
        ]
        assert any(reached) or not limited, workload["metadata"]["name"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["allowInsecure=false"], "tls.secretName"),
        (["pools=null"], "at least one pool"),
        (["router.enabled=true"], "router.engines"),
        (["admin.enabled=true"], "admin.tokensSecretName"),
        (["node.rdma.enabled=true"], "rdma.resources"),
        (["node.nvme[0].existingClaim=x"], "nvme"),
        (["node.dram=4096"], "dram"),
        (["node.drams=4GiB"], "drams"),
        (["pools.all.roles[0]=tape"], "roles"),
        (["node.podLabels.kvstore/pool=other"], "kvstore/pool"),
        (["settings.node\\.io_threads=8"], "settings"),
        (["node.terminationGracePeriodSeconds=5"], "terminationGracePeriodSeconds"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_chart_invalid_values_are_refused(values: list[str], said: str) -> None:
    arguments = [part for value in values for part in ("--set", value)]
    done = helm("template", "kv", str(CHART), "--values", str(CHART / "examples" / "plain.yaml"), *arguments)
    assert done.returncode != 0
    assert said in done.stderr


def test_chart_has_our_version_and_files() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == kvstore.__version__
    documents = rendered("tls")
    by_kind = {one["kind"]: one for one in documents}
    assert by_kind["PrometheusRule"]["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    dashboard = json.loads((DEPLOY / "grafana" / "kvstore.json").read_text())
    assert json.loads(by_kind["ConfigMap"]["data"]["kvstore.json"]) == dashboard
    ports = {port["name"] for one in documents if one["kind"] == "Service" for port in one["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in by_kind["ServiceMonitor"]["spec"]["endpoints"]} <= ports


def test_chart_runbook_base_makes_urls() -> None:
    (rules,) = (
        one
        for one in rendered("tls", "--set", "monitoring.prometheusRule.runbookBase=https://kvstore.example.net:7470/")
        if one["kind"] == "PrometheusRule"
    )
    urls = [rule["annotations"]["runbook_url"] for rule in rules["spec"]["groups"][0]["rules"]]
    assert all(url.startswith("https://kvstore.example.net:7470/docs/how-to/alerts.md#") for url in urls)


def test_chart_additions_reach_every_pod() -> None:
    values = {
        "podLabels.team": "cache",
        "podAnnotations.note": "kept",
        "topologySpreadConstraints[0].maxSkew": "1",
        "topologySpreadConstraints[0].topologyKey": "zone",
        "topologySpreadConstraints[0].whenUnsatisfiable": "ScheduleAnyway",
        "extraEnv[0].name": "TZ",
        "extraEnv[0].value": "UTC",
        "extraVolumes[0].name": "extra",
        "extraVolumes[0].emptyDir.medium": "Memory",
        "extraVolumeMounts[0].name": "extra",
        "extraVolumeMounts[0].mountPath": "/extra",
    }
    arguments = [
        part
        for kind in ("metadata", "node", "router", "admin")
        for key, value in values.items()
        for part in ("--set", f"{kind}.{key}={value}")
    ]
    workloads = pods(rendered("tls", *arguments))
    assert {chart_daemon(workload).arguments[0] for workload in workloads} == {"metadata", "node", "router", "admin"}
    for workload in workloads:
        pod = workload["spec"]["template"]
        assert pod["metadata"]["labels"]["team"] == "cache"
        assert pod["metadata"]["annotations"] == {"note": "kept"}
        assert pod["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "zone"
        (container,) = pod["spec"]["containers"]
        assert {"name": "TZ", "value": "UTC"} in container["env"]
        assert {"name": "extra", "mountPath": "/extra"} in container["volumeMounts"]
        assert {"name": "extra", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
        kubernetes_validate.validate(workload, KUBERNETES[-1], strict=True)


def test_chart_with_tls_opens_no_plain_text_but_metrics() -> None:
    for example, plain in (("tls", False), ("plain", True)):
        for workload in pods(rendered(example)):
            daemon = chart_daemon(workload)
            if daemon.arguments[0] in {"metadata", "node"}:
                section = getattr(daemon.config, daemon.arguments[0])
                assert (section.allow_insecure_remote, section.allow_insecure_metrics) == (plain, True)
