"""Files as accidents and enemies leave them: cut, flipped, repeated, with lies about sizes, with strange JSON."""

import copy
import json
import random
from typing import Any

_HUGE = [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 8, b"\xff\xff\xff\xff\xff\xff\xff\x7f"]
_TEXT = [
    b"inf",
    b"nan",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b"{",
    b"[[[[",
    b"null",
    b"\n",
    b"\x00",
    b"\xed\xa0\x80",
]

STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, 5e-324),
    *("", "inf", "nan", "x", "../../etc/passwd", "/", "\x00", "\ud800", "é" * 300, "gaussian", "teacher"),
    *([], [[]], {}, {"": None}, [1] * 50, {"kind": "gaussian"}, [[[[[[]]]]]]),
]


def damaged(valid: bytes, luck: random.Random) -> bytes:
    """One to four accidents, one after the other; now and then nothing of the file is left."""
    if luck.random() < 0.08:
        return luck.randbytes(luck.choice((0, 1, 7, 64, 1000)))
    content = bytearray(valid)
    for _ in range(luck.randint(1, 4)):
        place = luck.randrange(len(content) + 1)
        length = luck.choice((1, 1, 2, 4, 8, 50, 1000))
        match luck.randrange(8):
            case 0:
                del content[place:]
            case 1:
                del content[place : place + length]
            case 2:
                content[place : place + length] = luck.randbytes(length)
            case 3:
                content[place:place] = luck.choice((luck.randbytes(length), content[:length], luck.choice(_TEXT)))
            case 4:
                huge = luck.choice(_HUGE)
                content[place : place + len(huge)] = huge
            case 5:
                word = luck.choice(_TEXT)
                content[place : place + len(word)] = word
            case 6:
                content += content[place : place + length]
            case _ if content:
                content[place % len(content)] ^= 1 << luck.randrange(8)
    return bytes(content)


def damaged_json(value: Any, luck: random.Random) -> Any:
    """A copy in which one to three nodes are gone, doubled, or something else."""
    value = json.loads(json.dumps(value))
    for _ in range(luck.randint(1, 3)):
        nodes = list(_places(value))
        if not nodes:
            return copy.deepcopy(luck.choice(STRANGE))
        container, key = luck.choice(nodes)
        match luck.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[f"{key}X"] = container[key]
            case _:
                container[key] = copy.deepcopy(luck.choice(STRANGE))
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _places(child)


def as_json(value: Any) -> bytes:
    """As Python would write it: half characters and all."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
