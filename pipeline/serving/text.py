"""Text of a served model: its tokenizer, its chat template, and the text of tokens as they arrive.

All are read from the files of the artifact. The tokenizer is the one of tokenizer.json, so that a server needs no
transformers. A template is a program of the model's author, so it runs in Jinja's sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware, ModelSourceError
from nxpipe.pipeline.util.files import DocumentInvalid, json_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Files = Mapping[str, bytes]  # the files of an artifact by path

DEFAULT_TOKENS: Final = 64  # of a generated text, where nothing else limits it
TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT: Final = "default"  # of several templates, the one of chats
_REPLACEMENT: Final = "�"  # an incomplete character
_LONGEST_CONVERSATION: Final = 4096  # messages


_LIBRARIES: Final = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2")


def require_serving_libraries(*further: str) -> None:
    """Raise MissingSoftware for the first library that serving needs and that is not installed."""
    from importlib.util import find_spec

    for name in (*_LIBRARIES, *further):
        if find_spec(name) is None:
            raise MissingSoftware(name, "Serving", "run: pip install 'nxpipe[serve]'")


class Text:
    """The tokenizer and the chat template of a model; either may be absent."""

    def __init__(self, model: str, files: Files) -> None:
        self._model = model
        self._tokenizer = _tokenizer(model, files)
        self._settings = json_object(model, files, _SETTINGS)
        self._special = {name: text for name in _SPECIAL if (text := _content(self._settings.get(name))) is not None}
        self._template = _chat_template(model, files, self._settings)
        self._render: Callable[..., str] | None = None

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def tokenizer(self) -> "Tokenizer":
        if self._tokenizer is None:
            raise ModelSourceError(
                f"{self._model}: the artifact has no {TOKENIZER}, so it reads token ids alone; save the tokenizer "
                "beside the model with save_pretrained(), and build the model again"
            )
        return self._tokenizer

    def token(self, text: str) -> int | None:
        """The id of a token by its text."""
        return None if self._tokenizer is None else self._tokenizer.token_to_id(text)

    @property
    def end_of_text(self) -> int | None:
        """The tokenizer's own end of text."""
        return self.token(self._special["eos_token"]) if "eos_token" in self._special else None

    @property
    def mask_token(self) -> str | None:
        """The text of the token that stands for a masked one."""
        return self._special.get("mask_token")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds those that the tokenizer puts around a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def token_text(self, token: int) -> str:
        """One token by itself, as log probabilities name it."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False)) if self.has_tokenizer else str(token)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True, **variables: Any) -> list[int]:
        """The token ids of a conversation by the model's own template; `reply` ends with the beginning of an answer."""
        text = self.chat_text(messages, reply=reply, **variables)
        return self.encode(text, special=False)  # the template has written the special tokens

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True, **variables: Any) -> str:
        from jinja2 import TemplateError

        if len(messages) > _LONGEST_CONVERSATION:
            raise InputInvalid(f"messages: {len(messages):,} messages, and at most {_LONGEST_CONVERSATION:,} are read")
        try:
            return self._rendered()(
                messages=[dict(each) for each in messages], add_generation_prompt=reply, **self._special, **variables
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as fault:
            raise InputInvalid(f"messages: the chat template of {self._model} refuses them: {fault}") from fault

    def stream(self) -> "TokenStream":
        return TokenStream(self)

    def _rendered(self) -> Callable[..., str]:
        if self._render is None:
            if self._template is None:
                raise InputInvalid(
                    f"{self._model}: the artifact has no chat template; use completions, or build the model with its "
                    "tokenizer_config.json or chat_template.jinja"
                )
            self._render = _environment().from_string(self._template).render
        return self._render


class TokenStream:
    """The text of tokens as they arrive: a character is given once all of its tokens are there."""

    def __init__(self, text: Text) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = text.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes, which may be empty."""
        return self._stream.step(self._tokenizer, token) or ""


class StopStrings:
    """Text up to the first stop string. What may be the beginning of one is held back until it is known."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that is certain, and True if a stop string was completed."""
        if not self._stop:
            return text, False
        held = self._held + text
        places = [place for each in self._stop if (place := held.find(each)) >= 0]
        if places:
            self._held = ""
            return held[: min(places)], True
        keep = max((_overlap(held, each) for each in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def end(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _tokenizer(model: str, files: Files) -> "Tokenizer | None":
    if TOKENIZER not in files:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
    except Exception as fault:  # the library raises the base class
        raise ModelSourceError(f"{model}: its {TOKENIZER} cannot be read ({fault}); build the model again") from fault
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def json_object(model: str, files: Files, path: str) -> dict[str, Any]:
    """The JSON object in a file of the artifact; empty without the file."""
    if path not in files:
        return {}
    try:
        document = json_of(files[path])
    except DocumentInvalid as fault:
        raise ModelSourceError(f"{model}: {path}: {fault}; build the model again") from fault
    if not isinstance(document, dict):
        raise ModelSourceError(f"{model}: {path} is no JSON object; build the model again")
    return document


def _content(token: Any) -> str | None:
    """The text of a special token, which a file has as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(model: str, files: Files, settings: Mapping[str, Any]) -> str | None:
    plain, wrapped = _TEMPLATES
    if plain in files:
        return files[plain].decode("utf-8", "replace")
    template = json_object(model, files, wrapped).get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several templates by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get(_DEFAULT)
    return template if isinstance(template, str) else None


def _environment() -> Any:
    """Jinja as transformers sets it up, whose functions templates rely on."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=datetime.now().strftime)
    return environment
