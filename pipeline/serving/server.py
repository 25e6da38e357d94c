"""The HTTP server: OpenAI's endpoints, SageMaker's, probes and metrics, as one ASGI application.

`/healthz` says that the process and its programs work; `/readyz` and `/ping` that requests are accepted. On SIGTERM
`/readyz` fails first, so that load balancers send requests elsewhere; what was accepted is answered.
"""

import asyncio
import json
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from nxpipe.pipeline.serving.engine import NotServing, Overloaded
from nxpipe.pipeline.serving.generation import Generation, Mirror, RequestFailed, TextRequest
from nxpipe.pipeline.serving.metrics import Metrics
from nxpipe.pipeline.serving.openai import (
    ChatRequest,
    CompletionRequest,
    Json,
    Style,
    error_document,
    parsed,
)
from nxpipe.pipeline.serving.scheduler import Finish
from nxpipe.pipeline.serving.shadow import Shadow
from nxpipe.pipeline.serving.text import Text
from nxpipe.pipeline.util.errors import InputInvalid, ModelSourceError, PipelineError
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, json_of

if TYPE_CHECKING:
    from nxpipe.pipeline.serving.encoder import Encoding
    from nxpipe.pipeline.serving.model import ServingModel
    from nxpipe.pipeline.serving.sampling import SamplingParams

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_LARGEST_BODY: Final = 8 * MiB
_SHORT_PROMPT: Final = 4096  # characters, which a tokenizer reads in a millisecond
_EVENT_STREAM: Final = "text/event-stream"


class UnknownModel(PipelineError):
    """A request for a model that this server does not have."""


class BodyTooLarge(PipelineError):
    """A request with more bytes than are read."""


@dataclass
class Served:
    """What a server answers with: a decoder or an encoder, under its names."""

    names: tuple[str, ...]
    metrics: Metrics
    generation: Generation | None = None
    encoding: "Encoding | None" = None
    shadow: Shadow | None = None
    is_draining: bool = False

    @property
    def parts(self) -> "list[Generation | Encoding]":
        return [part for part in (self.generation, self.encoding) if part is not None]

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and bool(self.parts) and all(part.is_ready for part in self.parts)

    @property
    def fault(self) -> BaseException | None:
        return next((part.fault for part in self.parts if part.fault is not None), None)

    @property
    def stall(self) -> BaseException | None:
        """The reason why the decoder counts as hung."""
        engines = self.generation.engines if self.generation else ()
        return next((stall for engine in engines if (stall := engine.stall)), None)

    def require_model(self, name: str | None) -> str:
        if name is not None and name not in self.names:
            raise UnknownModel(f"model {name[:100]!r} is not served here; there is {', '.join(self.names)}")
        return name or self.names[0]

    def generator(self) -> Generation:
        if self.generation is None:
            raise InputInvalid(f"{self.names[0]} does not generate text")
        return self.generation


def application(served: Served, *, drain_seconds: float = 30.0) -> Starlette:
    """The application. Its lifespan opens the engines and ends with what they have accepted."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for part in served.parts:
            part.open()
        served.metrics.watch(served)
        try:
            yield
        finally:
            served.is_draining = True
            for part in served.parts:
                await part.drain(drain_seconds)
                await part.close()
            if served.shadow is not None:
                await served.shadow.close()

    server = _Endpoints(served)
    return Starlette(routes=server.routes(), lifespan=lifespan)


class _Endpoints:
    """The endpoints of a server."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def routes(self) -> list[Route]:
        posts: dict[str, Endpoint] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/embeddings": self.embeddings,
            "/v1/classify": self.classify,
            "/invocations": self.invocations,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Endpoint] = {
            "/v1/models": self.models,
            "/healthz": self.healthz,
            "/health": self.healthz,
            "/readyz": self.readyz,
            "/ping": self.readyz,
            "/metrics": self.metrics,
        }
        return [
            *(Route(path, _guarded(endpoint, self._served), methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, _guarded(endpoint, self._served), methods=["GET"]) for path, endpoint in gets.items()),
        ]

    # Generation

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, await _body(request))

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, await _body(request))

    async def _complete(self, request: Request, document: Json) -> Response:
        wanted, generation = parsed(CompletionRequest, document), self._served.generator()
        model = generation.model
        prompts = [
            model.require_tokens(await _encoded(model.text, each) if isinstance(each, str) else each)
            for each in wanted.prompts()
        ]
        params = wanted.params(model.default_params(), tokens=wanted.most_tokens, logprobs=wanted.logprobs)
        _require_known(model, params)
        params, mirror = self._mirrored(params, "/v1/completions", document)
        name = self._served.require_model(wanted.model)
        style = Style.of(name, model.text, is_chat=False, token_ids=wanted.return_token_ids)
        text = TextRequest(generation, prompts, params, wanted.most_tokens, wanted.n, style, wanted.wants_usage, mirror)
        return await _respond(request, text, stream=wanted.stream)

    async def _chat(self, request: Request, document: Json) -> Response:
        wanted, generation = parsed(ChatRequest, document), self._served.generator()
        model = generation.model
        prompt = model.require_tokens(await asyncio.to_thread(wanted.tokens, model.text), "messages")
        params = wanted.params(model.default_params(), tokens=wanted.most_tokens, logprobs=wanted.logprob_count)
        _require_known(model, params)
        params, mirror = self._mirrored(params, "/v1/chat/completions", document)
        name = self._served.require_model(wanted.model)
        style = Style.of(name, model.text, is_chat=True, token_ids=wanted.return_token_ids)
        text = TextRequest(
            generation, [prompt], params, wanted.most_tokens, wanted.n, style, wanted.wants_usage, mirror
        )
        return await _respond(request, text, stream=wanted.stream)

    def _mirrored(self, params: "SamplingParams", path: str, document: Json) -> "tuple[SamplingParams, Mirror | None]":
        """The parameters of a request that is mirrored, with a seed if it is sampled; and what takes its answer."""
        shadow = self._served.shadow
        to = None if shadow is None else shadow.sampled()
        if shadow is None or to is None:
            return params, None
        sent = {name: value for name, value in document.items() if name != "model"}
        if params.temperature > 0 and params.seed is None:
            params = replace(params, seed=secrets.randbits(62))
            sent["seed"] = params.seed
        return params, partial(shadow.mirror, to, path, sent)

    # Encoders

    async def embeddings(self, request: Request) -> Response:
        return await self._encode(request, await _body(request), "embeddings")

    async def classify(self, request: Request) -> Response:
        return await self._encode(request, await _body(request), "classify")

    async def _encode(self, request: Request, document: Json, endpoint: str) -> Response:
        if self._served.encoding is None:
            raise InputInvalid(f"{self._served.names[0]} has no endpoint {endpoint}: it generates text")
        model = self._served.require_model(document.get("model"))
        answer = await _unless_disconnected(request, self._served.encoding.answer(endpoint, document, model))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    # SageMaker

    async def invocations(self, request: Request) -> Response:
        """A request of SageMaker, by its fields: OpenAI's, or `inputs` and `parameters` as Hugging Face has them."""
        document = await _body(request)
        if "messages" in document:
            return await self._chat(request, document)
        if "prompt" in document:
            return await self._complete(request, document)
        if self._served.generation is None:
            endpoint = self._served.encoding.endpoint if self._served.encoding else ""
            return await self._encode(
                request, {**document, "input": document.get("input", document.get("inputs"))}, endpoint
            )
        if isinstance(document.get("inputs"), str):
            return await self._generate(request, document)
        raise InputInvalid("body: pass messages, prompt, input, or a text as inputs")

    async def _generate(self, request: Request, document: Json) -> Response:
        parameters = document.get("parameters", {})
        if not isinstance(parameters, Mapping):
            raise InputInvalid("parameters: pass an object")
        renamed = {"max_new_tokens": "max_tokens"}
        fields = {renamed.get(str(name), str(name)): value for name, value in parameters.items()}
        if fields.pop("do_sample", None) is False:
            fields["temperature"] = 0
        response = await self._complete(request, {"prompt": document["inputs"], **fields})
        if response.media_type == _EVENT_STREAM or response.status_code != 200:
            return response
        choices = json.loads(bytes(response.body))["choices"]
        return JSONResponse([{"generated_text": choice["text"]} for choice in choices])

    # Text

    async def tokenize(self, request: Request) -> Response:
        document, text = await _body(request), self._served.generator().model.text
        if not isinstance(document.get("prompt"), str):
            raise InputInvalid("prompt: pass a text")
        tokens = await _encoded(text, document["prompt"])
        capacity = self._served.generator().engines[0].scheduler.decoder.programs.capacity
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": capacity})

    async def detokenize(self, request: Request) -> Response:
        document, generation = await _body(request), self._served.generator()
        tokens = document.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise InputInvalid("tokens: pass a list of token ids")
        return JSONResponse({"prompt": generation.model.text.decode(generation.model.require_tokens(tokens, "tokens"))})

    # State

    async def models(self, _: Request) -> Response:
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "nxpipe"} for name in self._served.names]
        return JSONResponse({"object": "list", "data": entries})

    async def healthz(self, _: Request) -> Response:
        fault = self._served.fault or self._served.stall
        return PlainTextResponse("ok\n") if fault is None else PlainTextResponse(f"{fault}\n", 503)

    async def readyz(self, _: Request) -> Response:
        if self._served.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("draining\n" if self._served.is_draining else "not ready\n", 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._served.metrics.exposition(), media_type=Metrics.content_type)


def _require_known(model: "ServingModel", params: "SamplingParams") -> None:
    """InputInvalid for a token that the model does not have: its logits have no place for it."""
    model.require_tokens(list(params.logit_bias), "logit_bias")
    model.require_tokens(sorted(params.stop_tokens), "stop_token_ids")


async def _respond(request: Request, wanted: TextRequest, *, stream: bool) -> Response:
    """The answers of a request as one document, or as events."""
    if not stream:
        document = await _unless_disconnected(request, wanted.whole())
        return Response(status_code=499) if document is None else JSONResponse(document)
    events = wanted.events()
    first = await _unless_disconnected(request, anext(events))  # what is refused until then is a status, not an event
    if first is None:
        return Response(status_code=499)
    return StreamingResponse(_chained(first, events), media_type=_EVENT_STREAM, headers={"cache-control": "no-cache"})


async def _chained(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _encoded(text: Text, prompt: str) -> list[int]:
    """The tokens of a prompt; a long one does not delay the answers of others."""
    return text.encode(prompt) if len(prompt) < _SHORT_PROMPT else await asyncio.to_thread(text.encode, prompt)


async def _body(request: Request) -> Json:
    """The JSON object of a request; InputInvalid for another body, BodyTooLarge before all of it is read."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LARGEST_BODY:
            raise BodyTooLarge(f"the body has more than {_LARGEST_BODY:,} bytes")
    try:
        document = json_of(bytes(data))
    except DocumentInvalid as fault:
        raise InputInvalid(f"body: {fault}") from fault
    if not isinstance(document, dict):
        raise InputInvalid("body: pass a JSON object")
    return document


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """The result of work that is cancelled when the client goes away; then None."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


_STATUS: Final[Sequence[tuple[type[Exception], int, str]]] = (
    (UnknownModel, 404, "model_not_found"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (InputInvalid, 400, "invalid_request_error"),
    (ModelSourceError, 400, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (NotServing, 503, "server_error"),
    (RequestFailed, 500, "server_error"),
)


def _guarded(endpoint: Endpoint, served: Served) -> Endpoint:
    """The endpoint with errors as answers, and with its requests counted."""

    async def answer(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except ClientDisconnect:
            response = Response(status_code=499)
        except PipelineError as fault:
            response = _refusal(fault)
        served.metrics.count(request.url.path, response.status_code)
        if served.is_draining:
            response.headers["connection"] = "close"
        return response

    return answer


def _refusal(fault: PipelineError) -> Response:
    known = ((status, name) for kind, status, name in _STATUS if isinstance(fault, kind))
    status, name = next(known, (500, "server_error"))
    if isinstance(fault, RequestFailed) and fault.finish is Finish.TIMEOUT:
        status = 504
    headers = {"retry-after": f"{fault.retry_after:.0f}"} if isinstance(fault, Overloaded) else {}
    return JSONResponse(error_document(str(fault), name), status, headers)


class Server(uvicorn.Server):
    """A server that answers for `delay` seconds after SIGTERM, so that load balancers see it drain, and then ends."""

    def __init__(
        self, served: Served, *, host: str, port: int, delay: float, drain_seconds: float, keep_alive: float
    ) -> None:
        app = application(served, drain_seconds=drain_seconds)
        config = uvicorn.Config(
            app, host, port, log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=int(drain_seconds) or 1, timeout_keep_alive=int(keep_alive),
        )  # fmt: skip
        super().__init__(config)
        self._served, self._delay = served, delay
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_until_signal(self, announce: Callable[[str], None]) -> None:
        """Serve until a signal has ended the server; `announce` receives the URL once it listens."""
        self._announce = announce
        with suppress(KeyboardInterrupt):
            asyncio.run(self.serve())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; a second one, or Ctrl-C, ends at once."""
        if sig == signal.SIGINT or self._served.is_draining or not self._delay or self._loop is None:
            self.should_exit = True
            self.force_exit = self.force_exit or (sig == signal.SIGINT and self._served.is_draining)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._delay, self._exit)
        self._served.is_draining = True

    def _exit(self) -> None:
        self.should_exit = True
