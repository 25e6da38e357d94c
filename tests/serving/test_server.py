"""`nxpipe serve` as clients see it: OpenAI's own client, SageMaker's container contract, probes, overload, the end."""

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nxpipe.emulator.hardware import instance
from nxpipe.emulator.run.counters import published
from nxpipe.pipeline.fleet.monitor.emulated_instance import device_list
from tests.serving.server_process import Running, build, serving

pytestmark = pytest.mark.sample(8, "server")

PROMPT = "the river rose in the night"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(
        tmp_path_factory.mktemp("built"), "llama", "--phases", "extend,decode", "--batches", "4", "--buckets", "16,96"
    )


@pytest.fixture(scope="module")
def server(artifact: Any) -> Iterator[Running]:
    with serving(*artifact, "--max-waiting", "64") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_s_client_completes_and_streams_the_same_text(client: openai.OpenAI) -> None:
    (model, *_) = client.models.list().data
    whole = client.completions.create(model=model.id, prompt=PROMPT, logprobs=2, **GREEDY)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (12, "length")
    scored = whole.choices[0].logprobs
    assert scored is not None
    assert len(scored.tokens or ()) == len(scored.top_logprobs or ()) == 12
    stream = client.completions.create(
        model=model.id, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    parts = list(stream)
    assert "".join(choice.text for part in parts for choice in part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details}
    )
    assert [choice.finish_reason for part in parts for choice in part.choices][-1] == "length"


def test_openai_s_client_chats_by_the_checkpoint_s_template(client: openai.OpenAI, server: Running) -> None:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="llama", messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert all(len(each.top_logprobs) == 3 for each in whole.choices[0].logprobs.content or ())
    stream = client.chat.completions.create(model="llama", messages=messages, stream=True, **GREEDY)
    parts = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    rendered = "<s><|system|>be brief<|user|>hello<|assistant|>"
    tokens = server.post("/tokenize", prompt=rendered)["tokens"][1:]  # the tokenizer adds another <s>
    same = client.completions.create(model="llama", prompt=tokens, **GREEDY)
    assert same.choices[0].text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokens)


def test_several_prompts_and_answers_come_in_their_order(client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model="llama", prompt=each, **GREEDY).choices[0].text for each in (PROMPT, "hello")
    ]
    both = client.completions.create(model="llama", prompt=[PROMPT, "hello"], n=2, **GREEDY)
    assert [(choice.index, choice.text) for choice in both.choices] == list(
        enumerate([alone[0], alone[0], alone[1], alone[1]])
    )
    stream = client.completions.create(model="llama", prompt=[PROMPT, "hello"], stream=True, **GREEDY)
    texts = {0: "", 1: ""}
    for part in stream:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == alone


def test_a_seed_repeats_an_answer_and_its_copies_differ(client: openai.OpenAI) -> None:
    def texts(**more: Any) -> list[str]:
        found = client.completions.create(model="llama", prompt=PROMPT, max_tokens=16, temperature=1.5, n=3, **more)
        return [choice.text for choice in found.choices]

    assert texts(seed=11) == texts(seed=11)
    assert len(set(texts(seed=11))) == 3
    assert texts(seed=12) != texts(seed=11)


def test_text_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="llama", prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[3:5]
    choice = client.completions.create(model="llama", prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_requests_that_come_together_are_answered_as_alone(server: Running) -> None:
    prompts = [f"{'the town was dark ' * (number % 5)}hello {number}" for number in range(24)]

    def answer(prompt: str) -> str:
        text: str = server.post("/v1/completions", prompt=prompt, **GREEDY)["choices"][0]["text"]
        return text

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(answer, prompts)) == alone


def test_sagemaker_s_contract_holds(server: Running) -> None:
    assert server.request("GET", "/ping")[0] == 200
    plain = server.post("/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    given = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "do_sample": False}}
    assert server.post("/invocations", **given) == [{"generated_text": plain}]
    assert server.post("/invocations", prompt=PROMPT, **GREEDY)["choices"][0]["text"] == plain
    assert (
        "message" in server.post("/invocations", messages=[{"role": "user", "content": "hi"}], **GREEDY)["choices"][0]
    )


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "body: not valid JSON"),
        ([1], 400, "body: pass a JSON object"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": ""}, 200, ""),  # the tokenizer adds a token
        ({"prompt": []}, 400, "no prompt"),
        ({"prompt": [5, 100_000]}, 400, "token 100000 is not in the vocabulary of"),
        ({"prompt": [-1]}, 400, "token -1 is not in the vocabulary of"),
        ({"prompt": "a" * 4000}, 400, "tokens, and at most 95 are read"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"prompt": "a", "echo": True}, 400, "echo is not supported"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "'x' is no token id"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "is no token id"),
        ({"prompt": "a", "logit_bias": {"320": 1}}, 400, "logit_bias: token 320 is not in the vocabulary of 320"),
        ({"prompt": "a", "stop_token_ids": [-3]}, 400, "stop_token_ids: token -3 is not in the vocabulary"),
        ({"prompt": "a", "min_tokens": 40, "max_tokens": 20}, 400, "min_tokens: 40 are more than the 20 of max_tokens"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "model 'gpt-5' is not served here; there is llama"),
        ({"prompt": "a", "user": "someone", "metadata": {}}, 200, ""),
        (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413, "more than 8,388,608 bytes"),
    ],
)
def test_a_bad_request_is_one_sentence_of_openai_s_form(body: Any, status: int, sentence: str, server: Running) -> None:
    found, document, _ = server.request("POST", "/v1/completions", body)
    assert found == status, document
    if status != 200:
        assert sentence in document["error"]["message"]
        assert "\n" not in document["error"]["message"]
    assert server.request("GET", "/healthz")[0] == 200


def test_an_answer_has_at_least_min_tokens(client: openai.OpenAI, server: Running) -> None:
    tokens = server.post("/v1/completions", prompt=PROMPT, return_token_ids=True, **GREEDY)["choices"][0]["token_ids"]
    ends = {"stop_token_ids": tokens[:1]}
    stopped = client.completions.create(model="llama", prompt=PROMPT, extra_body=ends, **GREEDY)
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 1
    longer = client.completions.create(model="llama", prompt=PROMPT, extra_body=ends | {"min_tokens": 9}, **GREEDY)
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 9


def test_a_client_that_goes_away_frees_its_row(server: Running) -> None:
    def cancelled() -> float:
        return server.metric('serving_requests_finished_total{reason="cancelled"}')

    before = cancelled()
    for stream in (True, False):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body))
            if stream:
                connection.getresponse().read(10)
            else:
                time.sleep(0.02)
    ends = time.monotonic() + 20
    while cancelled() < before + 2 and time.monotonic() < ends:
        time.sleep(0.02)
    assert cancelled() == before + 2
    assert server.metric("serving_requests_running") == 0


def test_the_metrics_parse_and_count_what_was_done(server: Running) -> None:
    before = server.metric("serving_generation_tokens_total")
    server.post("/v1/completions", prompt=PROMPT, **GREEDY)
    assert server.metric("serving_generation_tokens_total") == before + 12
    families = {family.name for family in text_string_to_metric_families(server.get("/metrics"))}
    assert families >= {
        *("serving_requests_running", "serving_requests_waiting", "serving_kv_cache_usage_ratio", "serving_ready"),
        *("serving_time_to_first_token_seconds", "serving_time_per_output_token_seconds", "serving_requests_finished"),
    }


def test_an_overload_is_429_with_a_time_to_retry_and_passes(artifact: Any) -> None:
    with serving(*artifact, "--max-waiting", "2") as server:
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(32) as threads:
            found = list(threads.map(lambda _: server.request("POST", "/v1/completions", body), range(32)))
        statuses = [status for status, _, _ in found]
        assert set(statuses) == {200, 429}
        assert all(int(headers["retry-after"]) >= 1 for status, _, headers in found if status == 429)
        assert server.post("/v1/completions", **body)["usage"]["completion_tokens"] == 60


def test_sigterm_answers_what_was_accepted_while_readyz_fails(artifact: Any) -> None:
    with serving(*artifact, "--drain-delay", "1.5") as server:
        body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        statuses: list[int] = []
        clients = [
            threading.Thread(target=lambda: statuses.append(server.request("POST", "/v1/completions", body)[0]))
            for _ in range(12)
        ]
        for client in clients:
            client.start()
        time.sleep(0.1)
        server.terminate()
        time.sleep(0.3)
        assert server.request("GET", "/readyz")[0] == 503
        assert server.request("GET", "/healthz")[0] == 200
        assert server.request("POST", "/v1/completions", body)[0] == 200  # a load balancer has not seen it yet
        for client in clients:
            client.join()
        assert statuses == [200] * 12
        assert server.process.wait(20) == 0


def test_ctrl_c_ends_the_server_with_one_line_at_most(artifact: Any) -> None:
    with serving(*artifact) as server:
        server.terminate(signal.SIGINT)
        assert server.process.wait(20) in (0, 130)
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_the_device_tools_show_what_the_server_executes(artifact: Any, tmp_path: Path) -> None:
    counters = tmp_path / "counters"
    with serving(*artifact, NXPIPE_COUNTERS=str(counters)) as running:
        running.post("/v1/completions", prompt=PROMPT, **GREEDY)
        steps, chunks = running.metric("serving_steps_total"), running.metric("serving_prompt_chunks_total")
        ends = time.monotonic() + 30
        while not (found := published(counters)) or found[0]["executions"] < steps + chunks:
            assert time.monotonic() < ends
            time.sleep(0.05)
        (process,) = found
        (device,) = device_list(instance("inf2.xlarge"), found)
        assert [own["pid"] for own in device["neuron_processes"]] == [running.process.pid]
        assert process["summary"]["completed"] == process["executions"] == steps + chunks
        (core,) = process["cores"]
        assert core["busy"] > 0
        assert core["flops"] > 0
        assert min(core["memory"][category] for category in ("constants", "tensors")) > 0
        running.terminate(signal.SIGKILL)
        running.process.wait()
        assert published(counters) == []
