"""What every page must keep to, checked by a parser: used on all pages, and on broken ones it must complain about."""

import itertools
import re
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input", "line", "path", "circle"}
LANDMARKS = ("header", "nav", "main", "footer")


class Page(HTMLParser):
    """Collects what the rules ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        if self.open:
            self.problems.append(f"left open: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def problems(content: bytes) -> list[str]:
    text = content.decode()
    page = Page(text)
    found = list(page.problems)
    for tag, attrs in page.tags:
        for name in ("src", "href", "data", "action", "srcset", "poster", "xlink:href"):
            value = attrs.get(name)
            if value is not None and not value.startswith(("data:", "#")):
                found.append(f"{tag} fetches {value[:60]}")
        if any(name.startswith("on") for name in attrs):
            found.append(f"{tag} has a handler")
    if re.search(r"url\(\s*['\"]?(?!data:)", text) or "@import" in text:
        found.append("the style sheet fetches something")
    found += ["a script"] if page.all("script") else []
    found += ["an image without a text"] * sum(not attrs.get("alt") for attrs in page.all("img"))
    svgs = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    found += ["a picture without a text"] * sum(a.get("role") != "img" or not a.get("aria-label") for a in svgs)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    found += ["an id twice"] if len(ids) != len(set(ids)) else []
    for attrs in page.all("a"):
        if (attrs.get("href") or "")[1:] not in ids:
            found.append(f"a link to nowhere: {attrs.get('href')}")
    for attrs in page.all("section"):
        if attrs.get("aria-labelledby") not in ids:
            found.append("a section without a name")
    for name in LANDMARKS:
        if len(page.all(name)) != 1:
            found.append(f"{len(page.all(name))} <{name}>")
    if len(page.all("table")) != len(page.all("caption")):
        found.append("a table without a caption")
    found += ["a heading of a table without scope"] * sum("scope" not in attrs for attrs in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    if levels.count(1) != 1 or any(b > a + 1 for a, b in itertools.pairwise(levels)):
        found.append(f"headings {levels}")
    if page.all("html") and page.all("html")[0].get("lang") != "en":
        found.append("no language")
    if not any(attrs.get("name") == "viewport" for attrs in page.all("meta")):
        found.append("no viewport")
    if "\ufffd" in text or "Undefined" in text or "None" in page.text.replace("None: a GAN", "").replace("None.", ""):
        found.append("something was not filled in")
    if len(content) >= 5_000_000:
        found.append("too large")
    return found


def colours(css: str) -> list[dict[str, str]]:
    """The variables of each `:root`: light, dark, print."""
    return [
        dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in re.findall(r":root\s*\{([^}]*)\}", css)
    ]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
