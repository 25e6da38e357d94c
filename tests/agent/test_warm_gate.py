"""The warm gate of a server that completes text: answers that depend on the prompt; progress in service."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.fleet.agent.gate import Completions, TokenProgress
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import NotReady
from tests.agent.conftest import server
from tests.agent.project import CONFIG
from tests.agent.test_agent_run import Place, place
from tests.agent.test_agent_supervisor import agent_of, free_port
from tests.serving import checkpoints
from tests.serving.server_process import Running

__all__ = ["place", "server"]

pytestmark = pytest.mark.sample(8, "warm gate of the agent")


@dataclass
class StandIn:
    """A server with OpenAI's API, whose answers `choice` makes of a prompt; None: it does not answer in time."""

    choice: Callable[[list[int]], Any]
    status: int = 200
    tokens: float | None = None
    port: int = 0
    asked: list[list[int]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Completions]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics" and stand_in.tokens is not None:
                    name = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
                    return self._send(200, f"# TYPE x counter\n{name} {stand_in.tokens}\n".encode())
                known = self.path == "/v1/models"
                return self._send(200 if known else 404, b'{"data": [{"id": "m"}]}' if known else b"")

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (request["model"], request["max_tokens"]) == ("m", 1)
                stand_in.asked.append(request["prompt"])
                answer = stand_in.choice(request["prompt"])
                if answer is None:
                    time.sleep(1)
                self._send(stand_in.status, json.dumps({"choices": [answer] if answer else []}).encode())

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
                pass

        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as http:
            http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that does not wait
            threading.Thread(target=http.serve_forever, daemon=True).start()
            try:
                yield Completions("127.0.0.1", http.server_port, seconds=0.3)
            finally:
                http.shutdown()


def token(logprob: Any, text: str = "a") -> dict[str, Any]:
    return {"text": text, "logprobs": {"token_logprobs": [logprob]}}


def test_a_server_whose_answers_depend_on_the_prompt_passes() -> None:
    with StandIn(lambda prompt: token(-0.1 * len(prompt))).running() as completions:
        assert completions.generates()
        completions.require_varied()


@pytest.mark.parametrize(
    ("stand_in", "said"),
    [
        (StandIn(lambda _: token(-0.25)), "different prompts with the same token and log-probability -0.25"),
        (StandIn(lambda _: token(float("nan"))), "a token of log-probability nan"),
        (StandIn(lambda prompt: token(-0.1 * len(prompt)), status=500), "with status 500"),
        (StandIn(lambda _: {"text": "a", "logprobs": None}), "does not answer a request for one token"),
        (StandIn(lambda _: None), "does not answer a request for one token"),
    ],
    ids=["constant", "NaN", "errors", "without log-probabilities", "hangs"],
)
def test_a_server_that_computes_nothing_is_stopped_in_one_sentence(stand_in: StandIn, said: str) -> None:
    with stand_in.running() as completions, pytest.raises(NotReady) as stopped:
        completions.require_varied()
    assert said in str(stopped.value)


@pytest.mark.parametrize(
    ("stand_in", "expected"),
    [
        (StandIn(lambda _: token(-0.1)), True),
        (StandIn(lambda _: None, status=500), True),
        (StandIn(lambda _: None), True),
        (StandIn(lambda _: {}, status=400), False),
        (StandIn(lambda _: {}), False),
    ],
    ids=["completes", "fails", "hangs", "refuses", "has another task"],
)
def test_a_server_that_lists_a_model_and_fails_to_complete_is_no_server_for_another_task(
    stand_in: StandIn, expected: bool
) -> None:
    with stand_in.running() as completions:
        assert completions.generates() == expected


def test_generated_tokens_are_progress_and_so_is_an_answer_and_neither_is_a_fault() -> None:
    stand_in = StandIn(lambda _: token(-0.1), tokens=1)
    with stand_in.running() as completions:
        progress = TokenProgress(completions, limit=0.2)
        assert progress.fault() is None, "it answers"
        stand_in.choice, stand_in.tokens = (lambda _: None), 2
        stand_in.asked.clear()
        assert progress.fault() is None, "its requests get tokens"
        assert stand_in.asked == [], "a busy server gets no further request"
        assert "has generated no token for" in str(progress.fault())
    assert "has generated no token for" in str(progress.fault()), "nothing listens"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a verified tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    model = checkpoints.write(folder / "acme/tiny-bert", "llama")
    words = ("--weights", "random:0", "--target", "inf2.xlarge", "--buckets", "4,16", "--phases", "extend,decode")
    command = ["build", "--model-id", str(model), *words, "--batches", "2", "--store", str(folder / "store"), "--json"]
    answer = CliRunner().invoke(cli, command, obj=Console(quiet=True), catch_exceptions=False)
    assert answer.exit_code == 0, answer.stderr
    return folder / "store"


def test_a_fleet_without_a_command_serves_its_artifact_with_nxpipe(
    place: Place, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nxpipe.artifact_store import open_store

    store = open_store(str(llama))
    (published,) = store.list()
    log = ChannelLog(store.backend, "production")
    if log.newest() is None:
        from tests.artifact_store.afar import first_generation

        log.append(lambda _: first_generation("production", [Served.of(published)]))
    port = free_port()
    more = 'health_check = { interval = "5s", timeout = "2s" }\nready_within = "2m"\ndraining = "5s"\n'
    config = CONFIG.replace("golden_inputs = false\n", "").replace("file://store", f"file://{llama}")
    Path("nxpipe.toml").write_text(
        f"{config.replace('acme/tiny-bert', published.manifest.model.id).replace('fill-mask', 'text-generation')}"
        f"port = {port}\n{more}"
    )
    with agent_of(place) as agent:
        agent.await_ready()
        assert place.state == "InService"
        statuses = "\n".join(agent.statuses)
        assert "programs agree with their golden answers" in statuses, statuses
        served = Running(agent.process, port)
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        assert len(served.post("/v1/completions", **body)["choices"][0]["token_ids"]) == 4
        agent.process.terminate()
        code, _, err = agent.end()
        assert code == 0, err
