"""Escapes for untrusted text, one function per medium.

Names, messages and file names come from models, stores, servers and users. On a terminal their control characters
would move the cursor or set the window's title; in a job of GitHub Actions a line of them that begins with `::` would
be a command to the runner; in HTML and markdown they would be markup. What cannot be printed is shown as an escape
(`\\x1b`, `\\u202e`, `\\n`), so that a reader sees what is there. A text that was escaped is not changed by being
escaped again, but for HTML and markdown.
"""

import html
import json
import os
import re
from typing import Final
from unicodedata import category

# Marks the styles that we set ourselves. A text from elsewhere cannot contain it: it is another one in every process.
_MARK: Final = f"\x1b{os.urandom(8).hex()}"
_STYLE: Final = re.compile(re.escape(_MARK) + r"\[([0-9;]*)m")
_RESET: Final = 0

_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# The runner takes a line for a command that begins so, whatever blanks precede, and `##[` anywhere in it.
_COMMAND: Final = re.compile(r"^(\s*):(?=:)")
_OLD_COMMAND: Final = "##["
_MARKUP: Final = re.compile(r"""[\\`*_\[\]#|~:@/.$&<>"']""")
_NO_WIDTH: Final = "&#8203;"
_CONTROLS: Final = frozenset({"Cc", "Cf", "Cs"})  # C0, C1 and DEL; bidirectional and invisible; lone surrogates


def for_terminal(text: str) -> str:
    """In one line: every character that cannot be printed is an escape, line breaks and tabs too."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def for_log(line: str) -> str:
    """A line of output, which is no command to the runner of GitHub Actions."""
    line = for_terminal(line).replace(_OLD_COMMAND, r"#\x23[")
    return _COMMAND.sub(r"\1\\x3a", line)


def for_html(text: str) -> str:
    """As content and as the value of an attribute. Line breaks and tabs are white space there."""
    return html.escape(_without_controls(text, "\n\t"), quote=True)


def for_markdown(text: str) -> str:
    """No HTML, no markup and no link; nor a mention, which GitHub finds even where markdown sees a mere character."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};{_NO_WIDTH if found[0] == '@' else ''}", for_terminal(text))


def workflow_command(name: str, title: str, message: str) -> str:
    """A command to the runner of GitHub Actions, in which neither title nor message can be another one."""
    data = _workflow_data(message)
    return f"::{name} title={_workflow_data(title).replace(':', '%3A').replace(',', '%2C')}::{data}"


def for_json(value: object, indent: int | None = None, *, ascii_only: bool = False) -> str:
    """A document whose bytes neither steer a terminal nor command a runner, and that reads back as the same value."""
    return for_json_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


def for_json_text(document: str) -> str:
    """The same of a document in JSON that was written elsewhere: in its strings an escape stands for the same text."""
    if not document.replace("\n", "").isprintable():
        document = "".join(each if each.isprintable() or each == "\n" else _json_escape(each) for each in document)
    return document.replace(_OLD_COMMAND, r"#\u0023[")


def style(text: str, fg: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text with a colour of ours, which `styled` turns into what a terminal understands. Styles may be nested."""
    codes = [code for code, wanted in ((1, bold), (2, dim)) if wanted]
    codes += [_COLOURS[fg]] if fg else []
    return f"{_MARK}[{';'.join(map(str, codes))}m{shown(text)}{_MARK}[{_RESET}m" if codes else shown(text)


def shown(text: str) -> str:
    """`for_terminal` for what may hold our own styles, which stay."""
    if text.isprintable():
        return text
    parts = _STYLE.split(text)  # text, codes, text, codes, ..., text
    parts[::2] = map(for_terminal, parts[::2])
    parts[1::2] = (f"{_MARK}[{codes}m" for codes in parts[1::2])
    return "".join(parts)


def unstyled(text: str) -> str:
    return _STYLE.sub("", text)


def line_for(text: str, *, coloured: bool) -> str:
    """A line as it leaves: escaped, with our styles or without them."""
    said = for_log(unstyled(text))
    if coloured and _STYLE.search(text) and said == for_terminal(unstyled(text)):
        said = _STYLE.sub(lambda found: f"\x1b[{found[1]}m", shown(text))
    return said


_COLOURS: Final = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def _without_controls(text: str, kept: str) -> str:
    """Where a rare character does no harm, and one that turns the line around or is invisible does."""
    if text.isprintable():
        return text
    return "".join(_escape(each) if category(each) in _CONTROLS and each not in kept else each for each in text)


def _escape(character: str) -> str:
    number = ord(character)
    if number > 0xFFFF:
        return f"\\U{number:08x}"
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def _json_escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 0x7F else f"\\u{ord(character):04x}"


def _workflow_data(text: str) -> str:
    """The runner turns %0A back into a line break after it has taken the line for one command."""
    printable = _without_controls(text, "\r\n").replace(_OLD_COMMAND, r"#\x23[")
    return printable.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
