"""`nxpipe cost`: tokens and hours that instances reported, times dated prices."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from nxpipe.pipeline.config.device_measures import GENERATED_TOKENS, INSTANCE_SECONDS, NAMESPACE, PROMPT_TOKENS
from nxpipe.pipeline.config.prices import Purchase, load_prices
from nxpipe.pipeline.fleet.agent.watch import InstanceUse, PrintedLog, publish
from tests.agent.project import CONFIG
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

REGION = "us-east-1"


class Server:
    """A model server's metrics, as `nxpipe serve` and vLLM spell them."""

    def __init__(self) -> None:
        self.text = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(outer.text.encode())

            def log_message(self, *_: object) -> None:
                """Nothing is printed for a request."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def count(self, prefix: str, prompts: int, generated: int) -> None:
        self.text = (
            f'{prefix}prompt_tokens_total{{model="a"}} {prompts}\n'
            f"# TYPE {prefix}generation_tokens counter\n{prefix}generation_tokens_total {generated}.0\n"
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text(CONFIG)
    with mock_aws():
        yield


def report(use: InstanceUse) -> None:
    """One report of the agent's watch; its event becomes metrics as CloudWatch extracts them."""
    lines: list[str] = []
    dimensions = {"Project": "demo", "Fleet": "search"}
    publish([({}, 0)], "the monitor", dimensions, PrintedLog("i-1", lines.append), lines.append, use)
    (event,) = map(json.loads, lines)
    cloudwatch = boto3.client("cloudwatch", region_name=REGION)
    for directive in event["_aws"]["CloudWatchMetrics"]:
        named = [{"Name": name, "Value": event[name]} for name in directive["Dimensions"][0]]
        for metric in directive["Metrics"]:
            datum = {"MetricName": metric["Name"], "Dimensions": named, "Value": event[metric["Name"]]}
            cloudwatch.put_metric_data(Namespace=directive["Namespace"], MetricData=[datum])


@pytest.mark.parametrize("prefix", ["serving_", "vllm:"])
def test_tokens_and_hours_of_the_instances_times_the_price_is_the_cost(
    nxpipe: InProcess, account: None, server: Server, prefix: str
) -> None:
    clock = iter((0.0, 1800.0, 3600.0))
    server.count(prefix, 100, 1000)
    use = InstanceUse("inf2.xlarge", server.port, lambda: next(clock))
    server.count(prefix, 300, 501_000)
    report(use)
    server.count(prefix, 50, 500_000)  # it was restarted
    report(use)
    answer = nxpipe("cost", "--fleet", "search", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    price = load_prices().price(REGION, "inf2.xlarge")
    assert price is not None
    assert (found["generated_tokens"], found["prompt_tokens"]) == (1_000_000, 250)
    assert found["types"][0]["hours"] == pytest.approx(1.0)
    assert found["dollars_per_million_generated"] == pytest.approx(price.hourly)
    assert found["types"][0]["date"] == price.date.isoformat()
    page = nxpipe("cost", "--fleet", "search").out
    assert f"${price.hourly:,.2f} a million" in page
    assert str(price.date) in page


def test_another_way_of_buying_has_its_own_price_and_an_unknown_one_is_on_demand(
    nxpipe: InProcess, account: None, server: Server
) -> None:
    clock = iter((0.0, 3600.0))
    report(InstanceUse("inf2.xlarge", server.port, lambda: next(clock)))
    prices = load_prices()

    def dollars(*more: str) -> float:
        return float(json.loads(nxpipe("cost", "--fleet", "search", "--json", *more).out)["dollars"])

    reserved, on_demand = prices.price(REGION, "inf2.xlarge", Purchase.RESERVED_3Y), prices.of(REGION, "inf2.xlarge")
    assert reserved is not None
    assert dollars("--purchase", "reserved-3y") == pytest.approx(reserved.hourly)
    assert dollars("--purchase", "savings-plan-1y") == pytest.approx(on_demand)


def test_a_server_without_tokens_has_hours_only_and_a_silent_fleet_is_said(
    nxpipe: InProcess, account: None, server: Server
) -> None:
    assert "reported nothing" in nxpipe("cost", "--fleet", "search").out
    use = InstanceUse("inf2.xlarge", server.port)
    assert [metric.name for metric in use.metrics()] == [INSTANCE_SECONDS]
    report(use)
    names = boto3.client("cloudwatch", region_name=REGION).list_metrics(Namespace=NAMESPACE)["Metrics"]
    assert {GENERATED_TOKENS, PROMPT_TOKENS}.isdisjoint(metric["MetricName"] for metric in names)
    assert json.loads(nxpipe("cost", "--fleet", "search", "--json").out)["dollars_per_million"] is None


def test_a_fleet_that_is_not_there_is_refused(nxpipe: InProcess, account: None) -> None:
    refused = nxpipe("cost", "--fleet", "serch")
    assert refused.code == 2
    assert "did you mean 'search'" in refused.err
