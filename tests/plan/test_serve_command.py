"""`nxpipe plan`: its report in text, JSON and as a page, and the configuration that it writes."""

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.prices import Purchase, load_prices
from nxpipe.pipeline.plan.candidates import RUNTIMES, instances_of, planned_model
from nxpipe.pipeline.plan.schedulers import Scheduling
from nxpipe.pipeline.plan.serve import plan_serving
from nxpipe.pipeline.plan.serve_files import configuration, name_of
from nxpipe.pipeline.util.text import unstyled
from tests.pipeline.in_process import InProcess, nxpipe
from tests.plan.serving_demands import LLAMA, demand
from tests.stacks.local import new_app
from tests.stacks.whole import write_locks

__all__ = ["nxpipe"]

ROOT = Path(__file__).parents[2]
CDK = ROOT / "node_modules" / ".bin" / "cdk"
ASKED = (
    *("plan", "serve", "--model-id", LLAMA, "--rate", "20", "--prompt", "200", "--output", "40"),
    *("--ttft", "1s", "--tpot", "60ms@p90", "--region", "us-east-2"),
)
SMALL = (*ASKED, "--instance", "inf2.xlarge", "--runtime", "nxdi")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestReport:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("columns", [60, 100, 200])
    def test_the_tables_fit_the_terminal(
        self, columns: int, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        answer = nxpipe(*SMALL, "--instance", "trn1.32xlarge")
        assert answer.code == 0
        lines = [unstyled(line) for line in answer.out.splitlines()]
        start = next(n for n, line in enumerate(lines) if "$ for" in line or line.endswith("load"))
        table = lines[start : lines.index("", start)]
        assert all(len(line) <= columns for line in table), table

    @pytest.mark.sample(4)
    def test_every_figure_in_dollars_has_the_date_of_its_prices(self, nxpipe: InProcess) -> None:
        answer = nxpipe(*SMALL, "--gpu", "p5en.48xlarge", "--purchase", "on-demand", "--purchase", "capacity-block")
        dates = re.findall(r"prices of (\d{4}-\d\d-\d\d)", answer.out)
        assert len(dates) == 2
        document = json.loads(nxpipe(*SMALL, "--json").out)
        assert document["prices"].startswith("prices of ")
        assert all(plan["price"]["date"] for plan in document["plans"])

    def test_json_has_the_plans_their_intervals_and_what_bounds_each_program(self, nxpipe: InProcess) -> None:
        document = json.loads(nxpipe(*SMALL, "--json").out)
        plan = document["plans"][0]
        assert plan["instance"] == "inf2.xlarge"
        assert plan["tp"] * plan["copies"] <= 2
        assert plan["fleet"]["size"] > plan["fleet"]["needed"]
        assert plan["per_million_tokens"]["low"] <= plan["per_million_tokens"]["nominal"]
        assert all(step["bound_by"] for step in plan["steps"])
        assert document["demand"]["tpot"] == {"ms": 60.0, "quantile": 0.9}
        assert document["verdict"] == document["verdict"].strip()

    @pytest.mark.sample(4)
    def test_explain_names_the_bound_of_each_program(self, nxpipe: InProcess) -> None:
        plain, explained = nxpipe(*SMALL), nxpipe(*SMALL, "--explain")
        assert "bound by" not in plain.out
        assert explained.out.count("bound by") >= 2
        assert "Simulated, in requests/s" in explained.out

    def test_the_page_needs_no_network_and_no_script(self, nxpipe: InProcess, tmp_path: Path) -> None:
        answer = nxpipe(*SMALL, "--html", "plan.html", "--gpu", "p5en.48xlarge")
        assert answer.code == 0
        page = (tmp_path / "plan.html").read_text()
        elements: list[str] = []

        class Reader(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                elements.append(tag)
                assert all((value or "#").startswith("#") for name, value in attrs if name in ("src", "href"))

        Reader().feed(page)
        assert "svg" in elements
        assert "script" not in elements
        assert "default-src 'none'" in page.replace("&#x27;", "'")

    @pytest.mark.sample(4)
    def test_text_of_a_model_cannot_become_markup(self, nxpipe: InProcess, tmp_path: Path) -> None:
        folder = tmp_path / "<b>x"
        folder.mkdir()
        config = {
            "model_type": "llama",
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 512,
            "vocab_size": 1000,
            "max_position_embeddings": 4096,
        }
        (folder / "config.json").write_text(json.dumps(config))
        answer = nxpipe(*("plan", "serve", "--model-id", str(folder)), *SMALL[4:], "--html", "plan.html")
        assert answer.code == 0
        assert "<b>" not in (tmp_path / "plan.html").read_text()

    @pytest.mark.sample(4)
    def test_a_model_of_the_configuration_is_planned_by_its_name(self, nxpipe: InProcess, tmp_path: Path) -> None:
        (tmp_path / "nxpipe.toml").write_text(
            '[project]\nname = "shop"\nregion = "us-west-2"\n[[models]]\nname = "chat"\n'
            f'id = "{LLAMA}"\ntask = "text-generation"\ntarget = "inf2.xlarge"\ntp = 2\n'
        )
        asked = ("plan", "serve", "--model-id", "chat", "--rate", "2", "--prompt", "200", "--output", "40")
        answer = nxpipe(*asked, "--instance", "inf2.xlarge", "--runtime", "nxdi", "--json", "--out", "plan.toml")
        document = json.loads(answer.out)
        assert (document["model"], document["demand"]["region"]) == (LLAMA, "us-west-2")
        config = load_config(tmp_path / "plan.toml", {})
        assert (config.project.name, config.models[0].name) == ("shop", "chat")


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("--model-id", "no/model", "--rate", "1"), 2, "no model of the catalogue"),
            (("--model-id", "bert-base-uncased", "--rate", "1"), 2, "not for encoder"),
            (("--model-id", LLAMA), 2, "pass --rate"),
            (("--model-id", LLAMA, "--rate", "1", "--ttft", "soon"), 2, "500ms@p99"),
            (("--model-id", LLAMA, "--rate", "1", "--ttft", "0ms"), 2, "500ms@p99"),
            (("--model-id", LLAMA, "--rate", "1", "--instance", "inf9"), 2, "no Neuron instance type"),
            (("--model-id", LLAMA, "--rate", "1", "--prompt", "long"), 2, "no number of tokens"),
            (("--model-id", LLAMA, "--rate", "1", "--availability", "100%"), 2, "between 0% and 100%"),
            (("--model-id", LLAMA, "--rate", "1", "--measured-instance", "g5.xlarge"), 2, "belong together"),
            (
                ("--model-id", LLAMA, "--rate", "1", "--gpu", "x9.huge", "--instance", "inf2.xlarge"),
                2,
                "no GPU instance",
            ),
        ],
    )
    def test_bad_input_is_one_sentence(
        self, arguments: tuple[str, ...], code: int, says: str, nxpipe: InProcess
    ) -> None:
        answer = nxpipe("plan", "serve", *arguments)
        assert answer.code == code
        assert says in answer.err
        assert len([line for line in answer.err.splitlines() if line.startswith("Error")]) == 1

    def test_an_impossible_objective_has_a_reason_and_an_exit_code(self, nxpipe: InProcess, tmp_path: Path) -> None:
        answer = nxpipe(*SMALL, "--ttft", "1ms", "--no-gpu")
        assert answer.code == 18
        assert "no layout meets TTFT 1 ms" in answer.out
        answer = nxpipe(*SMALL, "--ttft", "1ms", "--no-gpu", "--out", "plan.toml")
        assert answer.code == 2
        assert not (tmp_path / "plan.toml").exists()

    def test_a_budget_below_every_plan_is_said(self, nxpipe: InProcess) -> None:
        answer = nxpipe(*SMALL, "--budget", "10")
        assert answer.code == 18
        assert "No plan is within the budget of $10.00 a month" in answer.out

    @pytest.mark.sample(4)
    def test_a_log_has_lengths_of_its_own(self, nxpipe: InProcess, tmp_path: Path) -> None:
        lines = [json.dumps({"timestamp": 100 * n, "input_length": 50 + n, "output_length": 5}) for n in range(40)]
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        asked = ("plan", "serve", "--model-id", LLAMA, "--log", "log.jsonl", "--instance", "inf2.xlarge", "--no-gpu")
        assert nxpipe(*asked, "--prompt", "5").code == 2
        document = json.loads(nxpipe(*asked, "--runtime", "nxdi", "--json").out)
        assert document["demand"]["requests_per_second"] == pytest.approx(10)
        assert document["demand"]["output_tokens"] == 5


def test_support_lists_layouts_and_reasons(nxpipe: InProcess) -> None:
    answer = nxpipe("plan", "support", "meta-llama/Llama-3.1-70B", "inf2.48xlarge", "trn2.48xlarge", "--json")
    document = json.loads(answer.out)
    assert answer.code == 0
    assert {each["instance"] for each in document["layouts"]} == {"inf2.48xlarge", "trn2.48xlarge"}
    assert all(each["tp"] == 24 for each in document["layouts"] if each["instance"] == "inf2.48xlarge")
    assert nxpipe("plan", "support", "meta-llama/Llama-3.1-70B", "inf2.xlarge").code == 18


def planned(types: list[str], scheduling: Scheduling, *purchases: Purchase) -> bytes:
    asked = demand(20, purchases=purchases)
    runtimes = [each for each in RUNTIMES if each.scheduling is scheduling]
    plan = plan_serving(planned_model(LLAMA), asked, instances_of(types), load_prices(), runtimes=runtimes, workers=1)
    return configuration(plan, plan.plans[0], today=datetime(2026, 11, 28, tzinfo=UTC))


WRITTEN = [
    (["inf2.xlarge"], Scheduling.NXDI, Purchase.ON_DEMAND),
    (["inf2.48xlarge"], Scheduling.NXPIPE, Purchase.ON_DEMAND),
    (["trn1.32xlarge"], Scheduling.NXDI, Purchase.SPOT),
    (["trn2.48xlarge"], Scheduling.VLLM, Purchase.CAPACITY_BLOCK),
]


class TestOut:
    @pytest.mark.parametrize(("types", "scheduling", "purchase"), WRITTEN)
    def test_the_written_configuration_is_valid_and_is_the_plan(
        self, types: list[str], scheduling: Scheduling, purchase: Purchase, tmp_path: Path
    ) -> None:
        path = tmp_path / "plan.toml"
        path.write_bytes(planned(types, scheduling, purchase))
        config = load_config(path, {})
        (model,), (fleet,) = config.models, config.fleets
        assert model.target == types[0]
        assert fleet.instance_types == tuple(types)
        assert fleet.model == model.name
        assert fleet.capacity.kind == purchase.value
        text = path.read_text()
        assert f"--tensor-parallel-size {model.tp}" in text or scheduling is Scheduling.NXPIPE
        assert "at prices of 20" in text

    @pytest.mark.parametrize(("types", "scheduling", "purchase"), WRITTEN)
    @pytest.mark.sample(16)
    def test_the_stacks_of_the_written_configuration_synthesise(
        self, types: list[str], scheduling: Scheduling, purchase: Purchase, tmp_path: Path
    ) -> None:
        from nxpipe.stacks.app import add_stacks, deployable

        write_locks(tmp_path)
        path = tmp_path / "plan.toml"
        path.write_bytes(planned(types, scheduling, purchase))
        cdk = new_app(outdir=str(tmp_path / "out"))
        add_stacks(cdk, deployable(path), tmp_path)
        names = {stack.node.id for stack in cdk.node.children}
        assert any("-serve-" in name for name in names)
        cdk.synth()

    @pytest.mark.sample(24, "plans by the cdk command")
    def test_plan_config_check_and_cdk_synth_follow_each_other(self, nxpipe: InProcess, tmp_path: Path) -> None:
        assert nxpipe(*SMALL, "--out", "plan.toml").code == 0
        assert nxpipe("config", "check", "--config", "plan.toml").code == 0
        write_locks(tmp_path)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        command = [str(CDK), "synth", "--quiet", "-c", f"config={tmp_path / 'plan.toml'}", "-o", str(tmp_path / "out")]
        env = kept | {"CDK_HOME": str(tmp_path / "home"), "CDK_VALIDATION": "false"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "out").glob("*-serve-*.template.json"))

    @pytest.mark.parametrize(
        ("model", "name"),
        [(LLAMA, "llama-3-1-8b"), ("./my Models/", "my-models"), ("x/" + "y" * 80, "y" * 24), ("a/---", "model")],
    )
    def test_names_are_those_that_the_configuration_permits(self, model: str, name: str) -> None:
        assert name_of(model) == name
