"""`nxpipe infra manifests`: the written files, with all versions pinned."""

from email import message_from_string
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.fleet.kubernetes.objects import to_yaml
from tests.pipeline.cluster_project import DIGESTS, IMAGES, LOCK, REGION, RESERVED, WHOLE, group, project, toml
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.kubernetes_schema import complaints
from tests.tiers import examples

__all__ = ["nxpipe", "project"]


def rendered(nxpipe: InProcess, text: str = WHOLE) -> dict[str, list[dict[str, Any]]]:
    """The objects of each file."""
    Path("nxpipe.toml").write_text(text)
    answer = nxpipe("infra", "manifests", "--out", "out")
    assert answer.code == 0, answer.err
    return {path.name: list(yaml.safe_load_all(path.read_text())) for path in Path("out").iterdir()}


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def images_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {value["image"]} if isinstance(value.get("image"), str) else set().union(*map(images_in, value.values()))
    return set().union(*map(images_in, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("type_", [name for name, row in INSTANCES.items() if row.servers == 1])
def test_every_object_is_of_a_known_kind_without_an_unknown_field(type_: str, project: Path, nxpipe: InProcess) -> None:
    files = rendered(nxpipe, toml(group("nodes", type_)))
    assert [complaint for objects in files.values() for entry in objects for complaint in complaints(entry)] == []
    assert ("efa-device-plugin.yaml" in files) == bool(INSTANCES[type_].efa_interfaces)
    node_class = one(files[f"karpenter-{type_.replace('.', '-')}.yaml"], "EC2NodeClass")["spec"]
    cards = [network_interface["networkCardIndex"] for network_interface in node_class.get("networkInterfaces", [])[1:]]
    assert cards == list(range(INSTANCES[type_].efa_interfaces or 0))
    assert node_class.get("networkInterfaces", [{"interfaceType": "interface"}])[0]["interfaceType"] == "interface"
    slots = [
        (network_interface["networkCardIndex"], network_interface["deviceIndex"])
        for network_interface in node_class.get("networkInterfaces", [])
    ]
    assert len(set(slots)) == len(slots)


def test_the_schema_finds_a_misspelt_field_a_missing_one_and_an_image_by_its_tag(
    project: Path, nxpipe: InProcess
) -> None:
    plugin = one(rendered(nxpipe)["neuron-device-plugin.yaml"], "DaemonSet")
    pod = plugin["spec"]["template"]["spec"]
    pod["toleration"] = pod.pop("tolerations")
    del plugin["spec"]["selector"]
    pod["containers"][0]["image"] = IMAGES["device_plugin"]
    assert len(complaints(plugin)) == 3


def test_every_image_is_that_of_the_lock_by_its_digest(project: Path, nxpipe: InProcess) -> None:
    files = rendered(nxpipe)
    found = images_in(list(files.values()))
    assert found == {f"{image.rpartition(':')[0]}@{digest}" for image, digest in DIGESTS.items()}
    assert one(files["karpenter-trn1-32xlarge.yaml"], "EC2NodeClass")["spec"]["amiSelectorTerms"] == [
        {"id": LOCK.neuron.image}
    ]


def test_pods_that_ask_the_scheduler_find_the_extension(project: Path, nxpipe: InProcess) -> None:
    files = rendered(nxpipe)
    config = yaml.safe_load(one(files["neuron-scheduler.yaml"], "ConfigMap")["data"]["config.yaml"])
    service = one(files["neuron-scheduler-extension.yaml"], "Service")
    pod = one(files["neuron-scheduler-extension.yaml"], "Deployment")["spec"]["template"]
    (port,) = service["spec"]["ports"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
    assert config["extenders"][0]["urlPrefix"] == f"http://{host}.svc.cluster.local:{port['port']}"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert container["env"] == [{"name": "PORT", "value": str(port["targetPort"])}]


def test_devices_are_monitored_on_every_node_that_has_some(project: Path, nxpipe: InProcess) -> None:
    pod = one(rendered(nxpipe)["neuron-monitor.yaml"], "DaemonSet")["spec"]["template"]["spec"]
    plugin = one(rendered(nxpipe)["neuron-device-plugin.yaml"], "DaemonSet")["spec"]["template"]["spec"]
    assert (pod["affinity"], pod["tolerations"]) == (plugin["affinity"], plugin["tolerations"])
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 8000}]
    assert container["securityContext"] == {"privileged": True}
    without = {key: image for key, image in IMAGES.items() if key != "monitor"}
    assert "neuron-monitor.yaml" not in rendered(nxpipe, toml(group("serve", "inf2.xlarge"), images=without))


def test_logical_cores_are_configured_before_a_node_joins(project: Path, nxpipe: InProcess) -> None:
    text = group("train", "trn2.48xlarge") + "lnc = 1\n"
    spec = one(rendered(nxpipe, toml(text))["karpenter-trn2-48xlarge.yaml"], "EC2NodeClass")["spec"]
    (script,) = (part for part in message_from_string(spec["userData"]).walk() if not part.is_multipart())
    assert script.get_content_type() == "text/x-shellscript"
    assert "NEURON_LOGICAL_NC_CONFIG=1 > /opt/aws/neuron/logical_nc_config" in script.get_payload()
    files = rendered(nxpipe, toml(group("train", "trn2.48xlarge")))
    assert "userData" not in one(files["karpenter-trn2-48xlarge.yaml"], "EC2NodeClass")["spec"]


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (group("serve", "inf2.xlarge") + "lnc = 1\n", "a inf2.xlarge has physical cores only"),
        (
            group("one", "trn2.48xlarge") + "lnc = 1\n" + group("two", "trn2.48xlarge"),
            "one and two are of trn2.48xlarge",
        ),
        (group("train", "trn2.48xlarge") + "lnc = 3\n", "lnc"),
    ],
)
def test_logical_cores_that_nodes_cannot_have_are_refused(
    groups: str, sentence: str, project: Path, nxpipe: InProcess
) -> None:
    Path("nxpipe.toml").write_text(toml(groups))
    answer = nxpipe("infra", "manifests", "--out", "out")
    assert answer.code == 3
    assert sentence in answer.err


def test_what_karpenter_starts_is_what_the_groups_of_the_type_may_be(project: Path, nxpipe: InProcess) -> None:
    groups = (group("one", "inf2.xlarge", RESERVED, "a"), group("two", "inf2.xlarge", '{ kind = "spot" }', "b"))
    objects = rendered(nxpipe, toml(*groups))["karpenter-inf2-xlarge.yaml"]
    spec = one(objects, "NodePool")["spec"]
    wanted = {
        requirement["key"].rpartition("/")[2]: requirement["values"]
        for requirement in spec["template"]["spec"]["requirements"]
    }
    assert wanted == {
        "instance-type": ["inf2.xlarge"],
        "zone": [f"{REGION}a", f"{REGION}b"],
        "capacity-type": ["reserved", "spot"],
    }
    assert spec["limits"] == {"cpu": str(8 * INSTANCES["inf2.xlarge"].vcpus)}
    node_class = one(objects, "EC2NodeClass")["spec"]
    assert node_class["capacityReservationSelectorTerms"] == [{"id": "cr-0a1b2c3d4e5f60718"}]


def test_an_existing_network_is_named_by_its_subnets(project: Path, nxpipe: InProcess) -> None:
    network = '[network]\nkind = "existing"\nvpc = "vpc-0a1b2c3d4e5f60718"\ncidr = "10.20.0.0/16"\n'
    for zone in "ab":
        network += f'[[network.subnets]]\nzone = "{REGION}{zone}"\nid = "subnet-0{zone}1b2c3d4e5f60718"\n'
    files = rendered(nxpipe, toml(group("train", "trn1.32xlarge"), more=network))
    terms = one(files["karpenter-trn1-32xlarge.yaml"], "EC2NodeClass")["spec"]["subnetSelectorTerms"]
    assert terms == [{"id": "subnet-0a1b2c3d4e5f60718"}, {"id": "subnet-0b1b2c3d4e5f60718"}]


def test_the_same_file_is_the_same_bytes_and_what_is_out_of_use_goes(project: Path, nxpipe: InProcess) -> None:
    rendered(nxpipe)
    first = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    Path("out", "mine.yaml").write_text("kind: Mine\n")
    rendered(nxpipe, toml(group("serve", "inf2.xlarge", RESERVED, "a")))
    assert not Path("out", "karpenter-trn1-32xlarge.yaml").exists()
    assert Path("out", "mine.yaml").read_text() == "kind: Mine\n"
    rendered(nxpipe)
    Path("out", "mine.yaml").unlink()
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == first


def test_a_file_of_somebody_elses_is_not_overwritten(project: Path, nxpipe: InProcess) -> None:
    Path("out").mkdir()
    Path("out", "neuron-scheduler.yaml").write_text("kind: Mine\n")
    answer = nxpipe("infra", "manifests", "--out", "out")
    assert (answer.code, Path("out", "neuron-scheduler.yaml").read_text()) == (5, "kind: Mine\n")
    assert [path.name for path in Path("out").iterdir()] == ["neuron-scheduler.yaml"]


@pytest.mark.parametrize(
    ("text", "lock", "said"),
    [
        ('[project]\nname = "search"\nregion = "us-east-2"\n', LOCK.text(), "cluster: found no such table"),
        (toml(group("serve", "inf2.xlarge"), images={}), LOCK.text(), "cluster.images: found no such table"),
        (WHOLE, None, "found no such file; expected the output of `nxpipe infra lock`"),
        (WHOLE, "nonsense", "found an unreadable file"),
        (WHOLE.replace("1.34", "1.35"), LOCK.text(), "found kubernetes 1.34; expected 1.35"),
        (WHOLE, LOCK.text().replace("us-east-2", "us-west-2", 1), "found region us-west-2; expected us-east-2"),
        (WHOLE.replace("v0.5.20", "v0.5.21"), LOCK.text(), "found no entry for 123456789012.dkr"),
    ],
)
def test_what_keeps_manifests_from_being_written_is_one_sentence(
    text: str, lock: str | None, said: str, project: Path, nxpipe: InProcess
) -> None:
    (project / "nxpipe.toml").write_text(text)
    (project / "nxpipe.cluster.lock").unlink()
    if lock is not None:
        (project / "nxpipe.cluster.lock").write_text(lock)
    answer = nxpipe("infra", "manifests", "--out", "out")
    assert answer.code == 3
    assert said in answer.err
    assert not Path("out").exists()


TEXTS: Final = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.just("\n"), max_size=20)
VALUES: Final = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.sampled_from(["yes", "1e3", "0x1", "null", "a: b", "# no", "a:b", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(60))
@given(st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_written_is_what_any_reader_of_yaml_reads(objects: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects
