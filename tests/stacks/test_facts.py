"""What the rules know of a project comes from its file, its lock and the price list."""

from datetime import UTC, date, datetime
from pathlib import Path

from nxpipe.pipeline.config import load_config
from nxpipe.stacks.lint.rules import accepted_by, facts_of

TOML = """\
[project]
name = "search"
region = "us-east-2"

[budget]
monthly = 20000

[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
target = "trn1.32xlarge"
buckets = [128]

[[fleets]]
kind = "serving"
name = "web"
model = "bert"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2a"
size = { min = 1, max = 2 }

[fleets.capacity]
kind = "capacity-block"
id = "cr-0a1b2c3d4e5f60718"
start = 2098-12-01T11:30:00Z
end = 2098-12-08T11:30:00Z

[fleets.standby]
instance_type = "g5.xlarge"
image = "ami-0a1b2c3d4e5f60718"
size = { min = 1, max = 1 }

[[acknowledge]]
rule = "NXP-NET-3"
resource = "search-serve-web/*"
reason = "behind the company's own proxy"
expires = 2027-06-01
"""
LOCK = """\
[[image]]
region = "us-east-2"
sdk = "2.32.0"
id = "ami-00000000000000002"
name = "Deep Learning AMI Neuron (Ubuntu 24.04) 20260901"
created = 2026-09-01
expires = 2028-08-31
source = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
"""


def test_a_project_tells_its_blocks_images_budget_and_name(tmp_path: Path) -> None:
    (tmp_path / "nxpipe.toml").write_text(TOML)
    (tmp_path / "nxpipe.amis.lock").write_text(LOCK)
    config = load_config(tmp_path / "nxpipe.toml", {})
    facts = facts_of(config, tmp_path)
    assert (facts.project, facts.budget) == ("search", 20000)
    window = facts.blocks["cr-0a1b2c3d4e5f60718"]
    assert (window.start, window.drained) == (
        datetime(2098, 12, 1, 11, 30, tzinfo=UTC),
        datetime(2098, 12, 8, 10, 45, tzinfo=UTC),
    )
    assert facts.images is not None
    assert facts.images["ami-00000000000000002"].expires == date(2028, 8, 31)
    assert facts.given_images == {"ami-0a1b2c3d4e5f60718"}
    assert facts.prices is not None
    (accepted,) = accepted_by(config)
    assert (accepted.rule, accepted.expires, accepted.optional) == ("NXP-NET-3", date(2027, 6, 1), False)
