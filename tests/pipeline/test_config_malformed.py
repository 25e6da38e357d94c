"""Every invalid file gets its own sentence: the line, the key, the value found, the values permitted."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

PROJECT = '[project]\nname = "search"\n'
MODEL = '[[models]]\nname = "bert"\nid = "bert-base-uncased"\ntask = "fill-mask"\ntarget = "inf2.xlarge"\n'
FLEET = (
    '[[fleets]]\nkind = "serving"\nname = "live"\nmodel = "bert"\nchannel = "prod"\n'
    'instance_types = ["inf2.xlarge"]\ncapacity = { kind = "on-demand" }\nsize = { min = 1, max = 2 }\n'
)
TRAINING = (
    '[[fleets]]\nkind = "training"\nname = "tune"\nmodel = "bert"\nchannel = "prod"\n'
    'instance_types = ["trn1.32xlarge"]\ncapacity = { kind = "spot" }\nnodes = 2\nzone = "us-east-2a"\n'
)
ENDPOINT = f"""\
[[endpoints]]
name = "answers"
model = "bert"
artifact = "{"0" * 64}"
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:{"0" * 64}"
instance_type = "ml.inf2.xlarge"
instances = 4
shift = {{ kind = "canary", percent = 25, bake = "10m" }}
"""
ON_TRN1 = MODEL.replace("inf2.xlarge", "trn1.2xlarge")


@dataclass(frozen=True)
class Wrong:
    content: str | bytes
    line: int | None
    key: str
    found: str
    allowed: str  # the essence of what the sentence says is allowed


def model(extra: str) -> str:
    """A file whose model has one more key, on line 8."""
    return f"{PROJECT}{MODEL}{extra}\n"


def fleet(old: str, new: str) -> str:
    """A file whose serving fleet, which begins on line 8, has something else in it."""
    assert old in FLEET
    return PROJECT + MODEL + FLEET.replace(old, new)


def scaled(scaling: str, least: str = "min = 1") -> str:
    """A file whose serving fleet scales, on line 16."""
    return fleet("min = 1", least) + f"scaling = {{ {scaling} }}\n"


def endpoint(old: str, new: str, more: str = "") -> str:
    """A file whose endpoint, which begins on line 8, has something else in it, or one more key on line 16."""
    assert old in ENDPOINT
    return PROJECT + MODEL + ENDPOINT.replace(old, new) + more


WRONG = {
    "empty": Wrong("", None, "", "no settings", "[project] with a name"),
    "only comments": Wrong("# to do\n\n", None, "", "no settings", "at least the table [project]"),
    "no project": Wrong("[build]\n", None, "project", "nothing", "a table that sets name"),
    "project without a name": Wrong(
        '[build]\n[project]\nregion = "us-east-2"\n', 2, "project.name", "nothing", "letter"
    ),
    "Latin-1": Wrong(PROJECT.encode() + b"# caf\xe9\n", 3, "", "the byte 0xe9", "UTF-8"),
    "UTF-8 with a mark": Wrong(b"\xef\xbb\xbf" + PROJECT.encode(), 1, "", "byte order mark of UTF-8", "without"),
    "UTF-16": Wrong(PROJECT.encode("utf-16"), 1, "", "byte order mark of UTF-16", "without"),
    "a NUL byte": Wrong(b'[project]\nname = "a\x00b"\n', 2, "", r"a\u0000b", "printable characters"),
    "two megabytes": Wrong("#" * (2 << 20), None, "", "more than 1,048,576 bytes", "within that size"),
    "unclosed string": Wrong('[project]\nname = "search\n', 2, "", r"name = \"search", "a closing quote"),
    "no value": Wrong("[project]\nname =\n", 2, "", "name =", "text in quotes"),
    "a bare word": Wrong("[project]\nname = search\n", 2, "", "name = search", "text in quotes"),
    "no equals sign": Wrong("[project]\nname\n", 2, "", "name", "key = value"),
    "a key twice": Wrong(PROJECT + 'name = "other"\n', 3, "", r"name = \"other\"", "only once"),
    "a table twice": Wrong(PROJECT + "[project]\n", 3, "", "[project]", "each [table] only once"),
    "unclosed list": Wrong(PROJECT + "[rollout]\nsteps = [5, 100\n", 4, "", "steps = [5, 100", "]"),
    "a day that no calendar has": Wrong(PROJECT + "[build]\ntimeout = 2026-02-30\n", 4, "", "2026-02-30", "calendar"),
    "lists without an end": Wrong("a = " + "[" * 5000 + "]" * 5000, None, "", "deeper than the limit", "a few levels"),
    "a number of 5000 digits": Wrong(
        f"{PROJECT}[build]\nparallelism = {'9' * 5000}\n", 4, "", "more than 4,300 digits", "64 bits"
    ),
    "a number of 20000 bits": Wrong(
        f"{PROJECT}[build]\nparallelism = 0x{'f' * 5000}\n", 4, "build.parallelism", "20000 bits", "from 1 to 256"
    ),
    "a section misspelt": Wrong(PROJECT + "[stor]\n", 3, "stor", "an unknown", 'did you mean "store"?'),
    "a key outside sections": Wrong('nane = "x"\n' + PROJECT, 1, "nane", "an unknown", "one of project, store"),
    "a section that is a number": Wrong("rollout = 5\n" + PROJECT, 1, "rollout", "5", "a table"),
    "one model without an array": Wrong(PROJECT + '[models]\nname = "a"\n', 3, "models", "a table", "[[models]]"),
    "models as text": Wrong('models = "bert"\n' + PROJECT, 1, "models", '"bert"', "headed [[models]]"),
    "a model as a number": Wrong("models = [7]\n" + PROJECT, 1, "models[0]", "7", "a table that sets name"),
    "a key misspelt": Wrong(model("bucket = [128]"), 8, "models[0].bucket", "an unknown", 'did you mean "buckets"?'),
    "a key in capitals": Wrong(model("TP = 2"), 8, "models[0].TP", "an unknown", 'did you mean "tp"?'),
    "a key with spaces": Wrong(model('"the tp" = 2'), 8, 'models[0]."the tp"', "an unknown", "one of name, id"),
    "a name in capitals": Wrong('[project]\nname = "Search"\n', 2, "project.name", '"Search"', "lower-case"),
    "an account as a number": Wrong(PROJECT + "account = 123456789012\n", 3, "project.account", "12345", "in quotes"),
    "an account of 11 digits": Wrong(PROJECT + 'account = "12345678901"\n', 3, "project.account", "12345", "12 digits"),
    "a date for a name": Wrong(
        "[project]\nname = 2026-01-01\n", 2, "project.name", "date or time 2026-01-01", "a name"
    ),
    "a region of another partition": Wrong(
        PROJECT + 'region = "us-gov-west-1"\n', 3, "project.region", "us-gov-west-1", "GovCloud"
    ),
    "one id of a repository": Wrong(
        PROJECT + '[release]\nrepository = "a/b"\nowner_id = 1\n', 3, "release", "repository_id", "both of owner_id"
    ),
    "a zone for a region": Wrong(PROJECT + 'region = "us-east-2a"\n', 3, "project.region", "us-east-2a", "AWS region"),
    "a store without a scheme": Wrong(PROJECT + '[store]\nurl = "/srv"\n', 4, "store.url", '"/srv"', "s3://BUCKET"),
    "a store on the web": Wrong(PROJECT + '[store]\nurl = "https://x/y"\n', 4, "store.url", "https", "file://FOLDER"),
    "a size without a unit": Wrong(PROJECT + "[store]\ncache_limit = 20\n", 4, "store.cache_limit", "20", "GiB"),
    "a size in other units": Wrong(
        PROJECT + '[store]\ncache_limit = "20 GB"\n', 4, "store.cache_limit", "20 GB", "TiB"
    ),
    "an endpoint twice": Wrong(
        PROJECT + '[store]\nendpoints = ["s3://abc", "s3://abc"]\n', 4, "store.endpoints", "s3://abc", "without repeats"
    ),
    "neither id nor path": Wrong(
        PROJECT + '[[models]]\nname = "m"\ntask = "fill-mask"\ntarget = "inf2.xlarge"\n',
        3,
        "models[0].path",
        "neither",
        "exactly one of id and path",
    ),
    "both id and path": Wrong(model('path = "./bert"'), 8, "models[0].path", "both", "exactly one of id and path"),
    "a revision of a folder": Wrong(
        model('revision = "main"').replace('id = "bert-base-uncased"', 'path = "./bert"'),
        8,
        "models[0].revision",
        '"main"',
        "no revision together with path",
    ),
    "an id with a space": Wrong(
        model("").replace("bert-base-", "bert "), 5, "models[0].id", "bert uncased", "a hub id"
    ),
    "a task misspelt": Wrong(
        model("").replace("fill-mask", "fillmask"), 6, "models[0].task", "fillmask", '"fill-mask"?'
    ),
    "a target misspelt": Wrong(
        model("").replace("inf2.x", "inf2,x"), 7, "models[0].target", "inf2,x", '"inf2.xlarge"?'
    ),
    "tp as a word": Wrong(model('tp = "eight"'), 8, "models[0].tp", '"eight"', "1, 2, 4, 8, 16, 24, 32 or 64"),
    "tp as a truth": Wrong(model("tp = true"), 8, "models[0].tp", "true", "1, 2, 4"),
    "tp as a fraction": Wrong(model("tp = 2.0"), 8, "models[0].tp", "2.0", "1, 2, 4"),
    "tp of three": Wrong(model("tp = 3"), 8, "models[0].tp", "3", "16, 24, 32"),
    "tp beyond the target": Wrong(
        model("tp = 8"), 8, "models[0].tp", "8", "at most 2, the logical cores of inf2.xlarge"
    ),
    "a batch of none": Wrong(model("batches = [0, 1]"), 8, "models[0].batches[0]", "0", "from 1 to 1024 (sequences)"),
    "a bucket as a truth": Wrong(model("buckets = [true]"), 8, "models[0].buckets[0]", "true", "131072 (tokens)"),
    "a bucket on its own line": Wrong(
        model("buckets = [\n  128, # short\n  [256],\n]"), 10, "models[0].buckets[1]", "[256]", "a whole number"
    ),
    "buckets out of order": Wrong(model("buckets = [512, 128]"), 8, "models[0].buckets", "[512, 128]", "ascending"),
    "no buckets": Wrong(model("buckets = []"), 8, "models[0].buckets", "an empty list", "1 to 64 items"),
    "one bucket without a list": Wrong(model("buckets = 128"), 8, "models[0].buckets", "128", "a list"),
    "a phase misspelt": Wrong(model('phases = ["foward"]'), 8, "models[0].phases[0]", '"foward"', '"forward"?'),
    "phases of another task": Wrong(
        model('phases = ["decode"]'), 8, "models[0].phases", '["decode"]', "the task is fill"
    ),
    "phases that exclude each other": Wrong(
        model('phases = ["forward", "decode"]'), 8, "models[0].phases", '"decode"', "forward is the whole model"
    ),
    "a seed without a number": Wrong(model('weights = "random:x"'), 8, "models[0].weights", "random:x", "random:SEED"),
    "an autocast of its own": Wrong(model('autocast = "matmul"'), 8, "models[0].autocast", "matmul", '"matmult"?'),
    "a model twice": Wrong(PROJECT + MODEL + MODEL, 9, "models[1].name", '"bert"', "models[0] has the same"),
    "a fleet without a kind": Wrong(fleet('kind = "serving"\n', ""), 8, "fleets[0].kind", "nothing", '"training"'),
    "a fleet of another kind": Wrong(fleet('"serving"', '"servin"'), 9, "fleets[0].kind", "servin", 'mean "serving"?'),
    "a fleet of a listed kind": Wrong(
        fleet('"serving"', '["serving"]'), 9, "fleets[0].kind", '["serving"]', '"training"'
    ),
    "a fleet of a numbered kind": Wrong(fleet('"serving"', "1"), 9, "fleets[0].kind", "1", '"training"'),
    "a project in an array": Wrong('[[project]]\nname = "p"\n', 1, "project", "[a table]", "a table that sets name"),
    "a fleet without a model": Wrong(PROJECT + FLEET, 6, "fleets[0].model", '"bert"', "it has none"),
    "a fleet that misspells it": Wrong(fleet('"bert"', '"brt"'), 11, "fleets[0].model", '"brt"', 'mean "bert"?'),
    "a fleet twice": Wrong(PROJECT + MODEL + FLEET * 2, 18, "fleets[1].name", '"live"', "fleets[0] has the same"),
    "types of two targets": Wrong(
        fleet('"inf2.xlarge"]', '"inf2.xlarge", "trn1.2xlarge"]'),
        13,
        "fleets[0].instance_types",
        "trn1",
        "one compiler",
    ),
    "a type of another target": Wrong(
        fleet('["inf2.xlarge"]', '["trn1.2xlarge"]'),
        13,
        "fleets[0].instance_types[0]",
        "runs trn1 programs",
        "for inf2",
    ),
    "a type too small for tp": Wrong(
        PROJECT + MODEL.replace("inf2.xlarge", "inf2.48xlarge") + "tp = 8\n" + FLEET,
        14,
        "fleets[0].instance_types[0]",
        "2 logical cores",
        "at least 8",
    ),
    "an endpoint without its model": Wrong(
        endpoint('model = "bert"', 'model = "brt"'), 10, "endpoints[0].model", '"brt"', 'mean "bert"?'
    ),
    "an endpoint of another's name": Wrong(
        endpoint("", "", ENDPOINT), 17, "endpoints[1].name", '"answers"', "endpoints[0] has the same"
    ),
    "an endpoint on instances for another target": Wrong(
        endpoint("ml.inf2", "ml.trn1").replace("trn1.xlarge", "trn1.2xlarge"),
        13,
        "endpoints[0].instance_type",
        "runs trn1 programs",
        "for inf2",
    ),
    "an endpoint on what SageMaker does not host": Wrong(
        endpoint("ml.inf2.xlarge", "ml.trn3_gen1"), 13, "endpoints[0].instance_type", "trn3", "ml.inf2.48xlarge"
    ),
    "an artifact by its key's first digits": Wrong(
        endpoint("0" * 64 + '"\nimage', '123456"\nimage'), 11, "endpoints[0].artifact", "123456", "64 hex digits"
    ),
    "an image of another registry": Wrong(
        endpoint("123456789012.dkr.ecr.us-east-2.amazonaws.com", "ghcr.io/acme"),
        12,
        "endpoints[0].image",
        "ghcr.io",
        "an image in ECR",
    ),
    "a canary of a single instance": Wrong(
        endpoint("instances = 4", "instances = 1"), 15, "endpoints[0].shift", "canary", "cannot split traffic"
    ),
    "a canary of less than an instance": Wrong(
        endpoint("= 25", "= 24"), 15, "endpoints[0].shift", "percent = 24", "at least 25 percent"
    ),
    "a canary of most instances": Wrong(
        endpoint("= 25", "= 51"), 15, "endpoints[0].shift.percent", "51", "from 1 to 50"
    ),
    "a shift that never ends": Wrong(
        endpoint('"canary", percent = 25, bake = "10m"', '"linear", percent = 10, bake = "1h"').replace("= 4", "= 10"),
        15,
        "endpoints[0].shift",
        '"1h"',
        "exceed the 8h",
    ),
    "a volume beside local disks": Wrong(
        endpoint("ml.inf2.xlarge", "ml.trn1.2xlarge", "disk = 100\n").replace('"inf2.xlarge"', '"trn1.2xlarge"'),
        16,
        "endpoints[0].disk",
        "100",
        "has local disks of a fixed size only",
    ),
    "a health check that ends after the next begins": Wrong(
        fleet("capacity =", 'health_check = { interval = "10s", timeout = "10s" }\ncapacity ='),
        14,
        "fleets[0].health_check.timeout",
        '"10s"',
        'shorter than interval, "10s"',
    ),
    "a probe without a server of its own": Wrong(
        fleet("capacity =", 'command = []\nprobe = { path = "/predict" }\ncapacity ='),
        15,
        "fleets[0].probe",
        "no command",
        "a server that it starts",
    ),
    "a probe with half of its JSON": Wrong(
        fleet("capacity =", 'command = ["serve"]\nprobe = { path = "/predict", expect = \'{"a": \' }\ncapacity ='),
        15,
        "fleets[0].probe.expect",
        r"{\"a\": ",
        "JSON as text",
    ),
    "a body for GET": Wrong(
        fleet("capacity =", 'command = ["serve"]\nprobe = { path = "/p", method = "GET", body = "{}" }\ncapacity ='),
        15,
        "fleets[0].probe.body",
        "body",
        "another method",
    ),
    "half a second of an idle timeout": Wrong(
        fleet("capacity =", 'idle_timeout = "1500ms"\ncapacity ='),
        14,
        "fleets[0].idle_timeout",
        "1500ms",
        "whole seconds",
    ),
    "a start that no lifecycle hook waits for": Wrong(
        fleet("capacity =", 'ready_within = "2h"\ncapacity ='), 14, "fleets[0].ready_within", '"2h"', '"110m"'
    ),
    "an idle timeout that no load balancer has": Wrong(
        fleet("capacity =", 'idle_timeout = "2h"\ncapacity ='), 14, "fleets[0].idle_timeout", '"2h"', '"4000s"'
    ),
    "a routing misspelt": Wrong(
        fleet("capacity =", 'routing = "weighted_random"\ncapacity ='),
        14,
        "fleets[0].routing",
        "weighted_random",
        'mean "weighted-random"?',
    ),
    "updates without an instance that stays": Wrong(
        fleet("capacity =", 'updates = { policy = "swap" }\ncapacity ='),
        14,
        "fleets[0].updates",
        "max_unavailable = 1",
        "max_unavailable below size.desired, which is 1",
    ),
    "updates of a server that the agent does not run": Wrong(
        fleet("capacity =", 'command = []\nupdates = { policy = "replace" }\ncapacity ='),
        15,
        "fleets[0].updates",
        'policy = "replace"',
        "a server that the agent runs",
    ),
    "testers of a fleet without a second environment": Wrong(
        fleet("min = 1,", "min = 2,").replace(
            "capacity =", 'updates = { policy = "swap" }\ntesters = ["10.1.0.0/28"]\ncapacity ='
        ),
        15,
        "fleets[0].testers",
        "10.1.0.0/28",
        "the fleet has no rollouts",
    ),
    "updates and rollouts": Wrong(
        fleet("min = 1,", "min = 2,").replace("capacity =", 'updates = { policy = "swap" }\ncapacity =')
        + "[rollout]\nsteps = [50, 100]\n",
        14,
        "fleets[0].updates.policy",
        "swap",
        "which choose the artifact of an environment",
    ),
    "testers that cannot call": Wrong(
        fleet("capacity =", 'clients = ["10.0.0.0/16"]\ntesters = ["10.1.0.0/28"]\ncapacity ='),
        15,
        "fleets[0].testers",
        "10.1.0.0/28",
        "ranges within clients",
    ),
    "testers beyond a listener rule": Wrong(
        fleet(
            "capacity =", f"testers = {[f'10.0.{number}.0/28' for number in range(5)]}\ncapacity =".replace("'", '"')
        ),
        14,
        "fleets[0].testers",
        "10.0.3.0/28",
        "1 to 4 items",
    ),
    "responses that outlast a block": Wrong(
        fleet(
            'capacity = { kind = "on-demand" }',
            'draining = "20m"\nzone = "us-east-2a"\ncapacity = { kind = "capacity-block", id = "cr-0a1b2c3d",'
            " start = 2026-11-01T00:00:00Z, end = 2026-11-08T00:00:00Z }",
        )
        .replace("inf2", "trn1")
        .replace("trn1.xlarge", "trn1.32xlarge"),
        14,
        "fleets[0].draining",
        '"20m"',
        'at most "15m"',
    ),
    "a rack as an instance": Wrong(
        fleet('["inf2.xlarge"]', '["trn3_gen1"]'), 13, "fleets[0].instance_types[0]", "trn3_gen1", "trn2u.48xlarge"
    ),
    "a capacity misspelt": Wrong(
        fleet("on-demand", "ondemand"), 14, "fleets[0].capacity.kind", "ondemand", "on-demand"
    ),
    "on demand with an id": Wrong(
        fleet('"on-demand"', '"on-demand", id = "cr-0a1b2c3d"'),
        14,
        "fleets[0].capacity.id",
        'kind = one of "reservation", "capacity-block" only',
        'a key of kind = "on-demand"',
    ),
    "a block of inf2": Wrong(
        fleet(
            '"on-demand"',
            '"capacity-block", id = "cr-0a1b2c3d", start = 2026-11-01T00:00:00Z, end = 2026-11-08T00:00:00Z',
        ),
        14,
        "fleets[0].capacity",
        "capacity-block",
        "trn1",
    ),
    "a reservation of two types": Wrong(
        fleet('["inf2.xlarge"]', '["inf2.xlarge", "inf2.8xlarge"]').replace(
            '"on-demand"', '"reservation", id = "cr-0a1b2c3d"'
        ),
        14,
        "fleets[0].capacity",
        "2 types",
        "one instance type",
    ),
    "a reservation without an id": Wrong(
        fleet("on-demand", "reservation"), 14, "fleets[0].capacity.id", "nothing", "the id of a reservation"
    ),
    "a reservation without a zone": Wrong(
        fleet('"on-demand"', '"reservation", id = "cr-0a1b2c3d"'),
        14,
        "fleets[0].capacity",
        "no zone",
        "`zone` in the fleet's table, beside `capacity`: a reservation is in one availability zone",
    ),
    "a reservation that a rollout exceeds": Wrong(
        fleet('{ kind = "on-demand" }', '{ kind = "reservation", id = "cr-0a1b2c3d", instances = 3 }').replace(
            "size = ", 'zone = "us-east-2a"\nsize = '
        ),
        16,
        "fleets[0].size",
        "max = 2",
        "max of at most 1: a rollout runs the old and the new version side by side (blue/green)",
    ),
    "scaling that never leaves zero": Wrong(
        scaled("requests_per_target = 600", "min = 0"),
        16,
        "fleets[0].scaling",
        "size.min = 0",
        "size.min of at least 1: a target group without instances has no requests per target",
    ),
    "scaling of a fixed size": Wrong(
        scaled("requests_per_target = 600", "min = 2"),
        16,
        "fleets[0].scaling",
        "size.min = size.max = 2",
        "size.max above size.min",
    ),
    "scaling with no load": Wrong(
        scaled("requests_per_target = 0"), 16, "fleets[0].scaling.requests_per_target", "0", "requests a minute"
    ),
    "a warm-up beyond the time limit": Wrong(
        scaled('requests_per_target = 600, warm_up = "31m"'),
        16,
        "fleets[0].scaling",
        'warm_up = "31m"',
        "warm_up of at most ready_within",
    ),
    "scaling of a capacity block": Wrong(
        PROJECT
        + MODEL.replace("inf2.xlarge", "trn1.32xlarge")
        + FLEET.replace("inf2.xlarge", "trn1.32xlarge").replace(
            '{ kind = "on-demand" }',
            '{ kind = "capacity-block", id = "cr-0a1b2c3d", start = 2098-01-01T00:00:00Z, end = 2098-01-02T00:00:00Z }',
        )
        + 'zone = "us-east-2a"\nscaling = { requests_per_target = 600 }\n',
        17,
        "fleets[0].scaling",
        "scaling",
        "no scaling: the instances of a capacity block are paid until its end",
    ),
    "a size upside down": Wrong(fleet("min = 1", "min = 3"), 15, "fleets[0].size.max", "2", "min <= desired <= max"),
    "a negative size": Wrong(
        fleet("min = 1", "min = -1"), 15, "fleets[0].size.min", "-1", "from 0 to 1000 (instances)"
    ),
    "a subnet in another form": Wrong(
        PROJECT + '[network]\nkind = "existing"\nvpc = "vpc-0a1b2c3d"\ncidr = "10.0.0.0/16"\n'
        '[[network.subnets]]\nzone = "us-east-2a"\nid = "10.0.0.0/24"\n',
        9,
        "network.subnets[0].id",
        "10.0.0.0/24",
        "the id of a subnet",
    ),
    "nodes of a serving fleet": Wrong(
        PROJECT + MODEL + FLEET + "nodes = 2\n", 16, "fleets[0].nodes", 'kind = "training" only', "instance_types"
    ),
    "training on inf2": Wrong(
        PROJECT + ON_TRN1 + TRAINING.replace("trn1.32xlarge", "inf2.48xlarge"),
        13,
        "fleets[0].instance_types[0]",
        "inf2.48xlarge",
        'one of "trn1.2xlarge"',
    ),
    "nodes that cannot talk": Wrong(
        PROJECT + ON_TRN1 + TRAINING.replace("trn1.32xlarge", "trn1.2xlarge"),
        15,
        "fleets[0].nodes",
        "2",
        "Elastic Fabric",
    ),
    "a block that ends first": Wrong(
        PROJECT
        + ON_TRN1
        + TRAINING.replace(
            '{ kind = "spot" }',
            '{ kind = "capacity-block", id = "cr-0a1b2c3d", start = 2026-11-02T00:00:00Z, end = 2026-11-01T00:00:00Z }',
        ),
        14,
        "fleets[0].capacity.end",
        "2026-11-01",
        "after the block's start",
    ),
    "a block in local time": Wrong(
        PROJECT
        + ON_TRN1
        + TRAINING.replace(
            '{ kind = "spot" }',
            '{ kind = "capacity-block", id = "cr-0a1b2c3d", start = 2026-11-02T00:00:00, end = 2026-11-03T00:00:00Z }',
        ),
        14,
        "fleets[0].capacity.start",
        "2026-11-02",
        "an offset",
    ),
    "steps that stop early": Wrong(
        PROJECT + "[rollout]\nsteps = [5, 50]\n", 4, "rollout.steps", "[5, 50]", "end in 100"
    ),
    "a step beyond all": Wrong(
        PROJECT + "[rollout]\nsteps = [5, 101]\n", 4, "rollout.steps[1]", "101", "from 1 to 100"
    ),
    "alpha of zero": Wrong(PROJECT + "[rollout]\nalpha = 0\n", 4, "rollout.alpha", "0", "above 0 and at most 0.1"),
    "alpha that is no number": Wrong(PROJECT + "[rollout]\nalpha = nan\n", 4, "rollout.alpha", "nan", "above 0"),
    "beta without end": Wrong(PROJECT + "[rollout]\nbeta = inf\n", 4, "rollout.beta", "inf", "at most 0.2"),
    "a duration in words": Wrong(
        PROJECT + '[rollout]\nbake_min = "ten minutes"\n', 4, "rollout.bake_min", "ten minutes", "ms, s, m, h, d"
    ),
    "a duration as a number": Wrong(
        PROJECT + "[build]\ntimeout = 3600\n", 4, "build.timeout", "3600", "a duration from"
    ),
    "a duration too long": Wrong(PROJECT + '[build]\ntimeout = "8d"\n', 4, "build.timeout", '"8d"', 'to "7d"'),
    "limits that cross": Wrong(
        PROJECT + '[rollout]\nbake_min = "2h"\nbake_max = "1h"\n', 5, "rollout.bake_max", '"1h"', "at least bake_min"
    ),
    "a guard misspelt": Wrong(
        PROJECT + '[rollout.guards]\nmax_p98 = "1s"\n', 4, "rollout.guards.max_p98", "an unknown", 'mean "max_p99"?'
    ),
    "an executor unknown": Wrong(PROJECT + '[build]\nexecutor = "rai"\n', 4, "build.executor", '"rai"', 'mean "ray"?'),
    "parallelism of none": Wrong(PROJECT + "[build]\nparallelism = 0\n", 4, "build.parallelism", "0", 'or "auto"'),
    "a cosine above one": Wrong(PROJECT + "[verify]\nmin_cosine = 1.5\n", 4, "verify.min_cosine", "1.5", "at most 1"),
    "a key without a scheme": Wrong(PROJECT + '[signing]\nkey = "k.pem"\n', 4, "signing.key", "k.pem", "kms:ARN"),
    "signatures by nobody": Wrong(
        PROJECT + MODEL + FLEET + '[signing]\nrequire = ["prod"]\n', 17, "signing.require", '["prod"]', "signing.key"
    ),
    "too few trusted keys": Wrong(
        PROJECT + MODEL + FLEET + '[signing]\nthreshold = 2\nrequire = ["prod"]\n'
        '[[signing.trusted]]\nname = "ops"\nkey = "file:o.pub"\n',
        18,
        "signing.require",
        '["prod"]',
        "at least 2 trusted keys (threshold) that may sign for prod, not 1",
    ),
    "two keys of one name": Wrong(
        PROJECT + '[[signing.trusted]]\nname = "a"\nkey = "file:o"\n[[signing.trusted]]\nname = "a"\nkey = "file:p"\n',
        3,
        "signing.trusted",
        '"a" twice',
        "unique names of keys",
    ),
    "one trusted key without an array": Wrong(
        PROJECT + '[signing.trusted]\nname = "a"\n', 3, "signing.trusted", "a table", "[[signing.trusted]]"
    ),
    "a trusted key in KMS": Wrong(
        PROJECT + '[[signing.trusted]]\nname = "a"\nkey = "kms:a"\n', 5, "signing.trusted[0].key", "kms:a", "file:PATH"
    ),
    "an expiry without an offset": Wrong(
        PROJECT + '[[signing.trusted]]\nname = "a"\nkey = "file:o"\nexpires = 2027-01-01T00:00:00\n',
        6,
        "signing.trusted[0].expires",
        "2027-01-01T00:00:00",
        "a time with an offset",
    ),
    "no channel's name": Wrong(
        PROJECT + '[signing]\nkey = "file:k"\nrequire = ["Prod"]\n', 5, "signing.require[0]", '"Prod"', "lower-case"
    ),
}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "nxpipe.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_told_by_line_key_found_and_allowed(nxpipe: InProcess, tmp_path: Path, wrong: Wrong) -> None:
    path = write(tmp_path, wrong.content)
    answer = nxpipe("config", "check", "--config", str(path))
    place = f"{path}:{wrong.line}" if wrong.line else f"{path}"
    sentence = answer.err.removeprefix("Error: ").rstrip("\n")
    result = re.fullmatch(
        "(?P<place>.*?): (?:(?P<key>[^ ].*?): )?found (?P<found>.*?); expected (?P<allowed>.*)", sentence
    )
    assert result is not None, f"not one sentence of our form: {answer.err}"
    assert (result["place"], result["key"] or "") == (place, wrong.key)
    assert wrong.found in result["found"]
    assert wrong.allowed in result["allowed"]
    assert (answer.code, answer.out) == (3, "")


def test_no_two_wrong_files_get_the_same_sentence(nxpipe: InProcess, tmp_path: Path) -> None:
    sentences = {
        nxpipe("config", "check", "--config", str(write(tmp_path, wrong.content))).err for wrong in WRONG.values()
    }
    told_apart_by_content = len(WRONG) - 1  # a file of comments says no more than an empty one
    assert len(sentences) == told_apart_by_content


def test_a_folder_and_a_missing_file_are_faults_too(nxpipe: InProcess, tmp_path: Path) -> None:
    folder = nxpipe("config", "check", "--config", str(tmp_path))
    missing = nxpipe("config", "check", "--config", str(tmp_path / "none.toml"))
    assert (folder.code, missing.code) == (3, 3)
    assert "found a folder; expected a file" in folder.err
    assert "does not exist; write one with `nxpipe init`, or pass --config PATH" in missing.err


def test_all_faults_of_a_file_are_told_at_once_in_the_order_of_the_file(nxpipe: InProcess, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[rollout]\nalpha = 2\n"
        + PROJECT
        + MODEL
        + "tp = 3\n"
        + FLEET.replace('"bert"', '"other"')
        + FLEET.replace("min = 1", "min = 9")
        + '[signing]\nkey = "file:k"\nrequire = ["nobody"]\n',
    )
    lines = nxpipe("config", "check", "--config", str(path)).err.removeprefix("Error: ").splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{path}:2", "rollout.alpha"],
        [f"{path}:10", "models[0].tp"],
        [f"{path}:14", "fleets[0].model"],
        [f"{path}:21", "fleets[1].name"],
        [f"{path}:26", "fleets[1].size.max"],
    ]


def test_a_model_that_is_wrong_itself_is_not_missed_by_its_fleet(nxpipe: InProcess, tmp_path: Path) -> None:
    path = write(tmp_path, PROJECT + MODEL + "tp = 3\n" + FLEET)
    answer = nxpipe("config", "check", "--config", str(path))
    assert "models[0].tp" in answer.err
    assert "fleets" not in answer.err


@pytest.mark.parametrize(
    "rule", ['require = ["prodd"]', '[[signing.trusted]]\nname = "a"\nkey = "file:o"\nchannels = ["prdo"]']
)
def test_a_channel_of_signing_that_looks_misspelt_is_noted(nxpipe: InProcess, tmp_path: Path, rule: str) -> None:
    """No fault: channels need no fleets. But the one that was meant is without a rule."""
    path = write(tmp_path, PROJECT + MODEL + FLEET + f'[signing]\nkey = "file:k"\n{rule}\n')
    answer = nxpipe("config", "check", "--config", str(path))
    assert answer.code == 0
    assert re.search(
        r"Note: \[signing\] names channel pr\w+, but no fleet .* serves it; did you mean 'prod'\?", answer.err
    )
