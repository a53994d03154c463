"""Reads plain values from files of torch.save. Nothing is unpickled: no class is looked up, and no tensor is made.

torch's own reader can be made to take any time and memory, even where it reads weights only, and in earlier versions to
run code. torch is not imported here.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from pickletools import genops
from typing import Any

from reconbound._internal.files import Unreadable

#: Bytes of the names and plain values of a file, without its tensors: reading so many takes seconds.
LARGEST = 2**24
#: The first value of a file in torch's old form; two more stand before the content.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
#: What may be named in a file: tensors and their containers. None of it is looked up.
_PACKAGES, _BUILTINS = ("torch", "collections", "_codecs"), ("set", "bytearray", "complex")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
_MAKERS: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotRead:
    """Stands for a tensor or another object."""

    def __repr__(self) -> str:
        return "a tensor or an object"


NOT_READ = NotRead()
_ORDERED_DICT = NotRead()


def read_plain(path: Path) -> Any:
    """Returns what a file of torch.save holds: dictionaries, lists, tuples, texts and numbers; NOT_READ for the rest.

    Args:
        path: the file.

    Raises:
        Unreadable: another file, a damaged one, or one that names classes of other packages than torch; says why.
    """
    try:
        with path.open("rb") as opened:
            if opened.read(2) == b"PK":
                return _Reader().read(io.BytesIO(_record(opened)))
            opened.seek(0)
            return _old_form(io.BytesIO(opened.read(LARGEST)))
    except (OSError, Unreadable):
        raise
    except Exception as reason:  # zipfile and pickletools raise errors of many kinds on damaged files
        raise Unreadable(f"it is no file of torch.save ({type(reason).__name__})") from None


def _record(opened: Any) -> bytes:
    """Returns the record of a zip file in which everything but the tensors is."""
    with zipfile.ZipFile(opened) as packed:
        found = [name for name in packed.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise Unreadable("it has no content of torch.save")
        with packed.open(found[0]) as record:
            content = record.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Unreadable(f"its plain values take more than {LARGEST // 2**20} MiB")
    return content


def _old_form(stream: io.BytesIO) -> Any:
    first = _Reader().read(stream)
    if first != _OLD_MAGIC:
        raise Unreadable("it is no file of torch.save")
    for _ in range(2):
        _Reader().read(stream)
    return _Reader().read(stream)


class _Reader:
    """Follows the instructions of a pickle of protocol 2 that make plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, stream: io.BytesIO) -> Any:
        for code, argument, _ in genops(stream):
            self._follow(code.name, argument)
        return self._stack.pop()

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _MAKERS:
            stack.append(_MAKERS[name]())
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "TUPLE" or name in _SIZES:
            stack.append(tuple(self._last(_SIZES.get(name))))
        elif name in ("APPEND", "APPENDS"):
            self._append(self._last(1 if name == "APPEND" else None))
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(self._last(2 if name == "SETITEM" else None))
        elif name not in ("PROTO", "STOP"):
            self._pass_over(name, argument)

    def _last(self, count: int | None) -> list[Any]:
        """Returns the last values, or those after the last mark, and takes them off the stack."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if not max(self._marks, default=0) <= start <= len(self._stack):
            raise Unreadable("it is no file of torch.save")
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _append(self, values: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1] += values
        elif not isinstance(self._stack[-1], NotRead):
            raise Unreadable("it is no file of torch.save")

    def _set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict | NotRead):
            raise Unreadable("it is no file of torch.save")
        for name, value in zip(values[::2], values[1::2], strict=True):
            if isinstance(target, dict) and isinstance(name, str | int):  # the hash of nested tuples may take for ever
                target[name] = value

    def _pass_over(self, name: str, argument: Any) -> None:
        """Puts NOT_READ in the place of a class, a call, a tensor or an object."""
        found: Any = NOT_READ
        if name == "GLOBAL":
            module, _, thing = argument.partition(" ")
            known = module.partition(".")[0] in _PACKAGES
            if not known and not (module in ("__builtin__", "builtins") and thing in _BUILTINS):
                raise Unreadable(f"it names {f'{module}.{thing}'[:100]!r}, and nothing in a file is run")
            found = _ORDERED_DICT if (module, thing) == ("collections", "OrderedDict") else NOT_READ
        elif name in ("REDUCE", "NEWOBJ"):
            called, given = self._last(2)
            found = {} if called is _ORDERED_DICT and given == () else NOT_READ
        elif name == "BUILD":  # attributes of what is before it
            self._last(1)
            return
        elif name == "BINPERSID":
            self._last(1)
        elif name != "EMPTY_SET":
            raise Unreadable(f"it holds {name}, which torch.save does not write")
        self._stack.append(found)
