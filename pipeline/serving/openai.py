"""OpenAI's API: requests as they come, and answers as clients expect them. Nothing here runs a program.

Fields that would change an answer and are not supported are refused; others, such as `user`, are ignored.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nxpipe.pipeline.serving.sampling import Chosen, SamplingParams
from nxpipe.pipeline.serving.scheduler import Finish
from nxpipe.pipeline.util.errors import InputInvalid

if TYPE_CHECKING:
    from nxpipe.pipeline.serving.text import Text

Json: TypeAlias = dict[str, Any]
_MOST_ANSWERS: Final = 16
_MOST_LOGPROBS: Final = 20
_COMPLETION_TOKENS: Final = 16  # OpenAI's default of a completion
# Fields that change the answer, with the values that change nothing.
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("suffix", "tools", "functions", "audio", "prediction"), (None, [], "")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None,)),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "use_beam_search": (None, False),
    "tool_choice": (None, "none"),
}

Text_: TypeAlias = str
Tokens: TypeAlias = list[int]
Unit: TypeAlias = Annotated[float, Field(ge=-2, le=2)]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Sampled(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] = 1
    seed: int | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    presence_penalty: Unit | None = None
    frequency_penalty: Unit | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None

    def params(self, defaults: SamplingParams, *, tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The parameters of each answer; `tokens` are at most generated, if the request limits them."""
        if tokens is not None and self.min_tokens is not None and self.min_tokens > tokens:
            raise InputInvalid(f"min_tokens: {self.min_tokens:,} are more than the {tokens:,} of max_tokens; lower it")
        given = {
            name: value
            for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
            if (value := getattr(self, name)) is not None
        }
        if given.get("seed", 0) < 0:
            given["seed"] += 1 << 64  # OpenAI's seeds are signed
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        return replace(
            defaults,
            **given,
            max_tokens=tokens or 1,  # the server takes what is left of the cache
            logprobs=logprobs,
            logit_bias={_token(name): bias for name, bias in (self.logit_bias or {}).items()},
            stop=(self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ()),
            stop_tokens=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens or 0,
        )

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def require_supported(self) -> None:
        extra = self.model_extra or {}
        for name, harmless in _UNSUPPORTED.items():
            if name in extra and extra[name] not in harmless:
                raise InputInvalid(f"{name} is not supported; leave it out")


def _token(name: str) -> int:
    if not name.isdecimal() or len(name) > 18:
        raise InputInvalid(f"logit_bias: {name[:40]!r} is no token id")
    return int(name)


class CompletionRequest(_Sampled):
    prompt: Text_ | list[Text_] | Tokens | list[Tokens]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise InputInvalid("prompt: no prompt; pass a text or a list of token ids")
        return list(prompt)  # type: ignore[arg-type]

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or _COMPLETION_TOKENS


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[Json] | None = None

    def as_plain(self) -> Json:
        """The message with the text of its parts, as templates read it."""
        document = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            unread = next((part.get("type") for part in self.content if part.get("type") != "text"), None)
            if unread is not None:
                raise InputInvalid(f"messages: a part of type {unread!r}; only text is read")
            document["content"] = "".join(str(part.get("text", "")) for part in self.content)
        return document


class ChatRequest(_Sampled):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Json = Field(default_factory=dict)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def tokens(self, text: "Text") -> list[int]:
        variables = {name: value for name, value in self.chat_template_kwargs.items() if name != "messages"}
        messages = [message.as_plain() for message in self.messages]
        return text.chat(messages, reply=self.add_generation_prompt, **variables)


class EmbeddingRequest(BaseModel):
    input: Text_ | list[Text_] | Tokens | list[Tokens]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None

    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return list(self.input)  # type: ignore[arg-type]


Request = TypeVar("Request", bound=BaseModel)


def parsed(kind: type[Request], document: Any) -> Request:
    """A request; InputInvalid names the first field that is wrong."""
    try:
        request = kind.model_validate(document)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in kind.model_fields)
        raise InputInvalid(f"{place or 'body'}: {first['msg']}") from fault
    if isinstance(request, _Sampled):
        request.require_supported()
    return request


# Answers


@dataclass
class Answer:
    """One answer as it grows."""

    index: int
    text: str = ""
    finish: Finish | None = None
    chosen: list[Chosen] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    prompt: int
    completion: int
    reused: int = 0

    def document(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


@dataclass(frozen=True)
class Style:
    """The documents of one endpoint, of one request."""

    is_chat: bool
    model: str
    text: "Text"
    has_token_ids: bool
    id: str
    created: int

    @classmethod
    def of(cls, model: str, text: "Text", *, is_chat: bool, token_ids: bool) -> "Style":
        """The style of a request; without a tokenizer, its answer is token ids."""
        own = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return cls(is_chat, model, text, token_ids or not text.has_tokenizer, own, int(time.time()))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._document(kind, [self._choice(answer) for answer in answers]) | {"usage": usage.document()}

    def first(self, index: int) -> Json | None:
        """The event before the first token of an answer: a chat names the role."""
        if not self.is_chat:
            return None
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._document("chat.completion.chunk", [choice])

    def piece(self, part: Answer) -> Json:
        """The event of what was added to an answer."""
        if not self.is_chat:
            return self._document("text_completion", [self._choice(part)])
        delta = {"content": part.text} if part.text or part.finish is None else {}
        choice = self._choice(part) | {"delta": delta}
        del choice["message"]
        return self._document("chat.completion.chunk", [choice])

    def usage(self, usage: Usage) -> Json:
        """The last event of a stream that reports its usage."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._document(kind, []) | {"usage": usage.document()}

    def _document(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, answer: Answer) -> Json:
        reason = None if answer.finish is None else str(answer.finish)
        ends: Json = {"index": answer.index, "logprobs": self._logprobs(answer), "finish_reason": reason}
        if self.has_token_ids:
            ends["token_ids"] = [chosen.token for chosen in answer.chosen]
        if self.is_chat:
            return ends | {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return ends | {"text": answer.text}

    def _logprobs(self, answer: Answer) -> Json | None:
        scored = [(chosen, chosen.logprob) for chosen in answer.chosen if chosen.logprob is not None]
        if not scored:
            return None
        if self.is_chat:
            return {"content": [self._scored(chosen) for chosen, _ in scored], "refusal": None}
        named = self.text.token_text
        return {
            "tokens": [named(chosen.token) for chosen, _ in scored],
            "token_logprobs": [logprob for _, logprob in scored],
            "top_logprobs": [{named(token): logprob for token, logprob in chosen.likeliest} for chosen, _ in scored],
            "text_offset": answer.offsets,
        }

    def _scored(self, chosen: Chosen) -> Json:
        return self._token(chosen.token, chosen.logprob) | {
            "top_logprobs": [self._token(token, logprob) for token, logprob in chosen.likeliest]
        }

    def _token(self, token: int, logprob: float | None) -> Json:
        text = self.text.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def error_document(message: str, kind: str, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
