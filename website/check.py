"""Checks of the built site: nothing comes from the network, every link and anchor resolves."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that a browser loads something for, and the attribute with its address."""
NOT_LOADED = {"canonical", "prev", "next", "alternate", "me"}
"""Kinds of <link> for which nothing is loaded."""
STYLE_ADDRESS = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")


class _Links(HTMLParser):
    """Collects the addresses and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        address = attributes.get(LOADING.get(tag, ""), "")
        if address and not set(attributes.get("rel", "").split()) & NOT_LOADED:
            self.loaded.append(address)
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])


def read_page(path: Path) -> _Links:
    """Return the addresses and anchors of a page."""
    links = _Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def is_external(address: str) -> bool:
    """Return whether an address is on another machine."""
    return address.startswith(("http://", "https://", "//"))


def problems_of(site: Path) -> list[str]:
    """Return what is wrong with the site, one sentence each; nothing if all is well."""
    pages = {path.resolve(): read_page(path) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        problems += [
            f"{name} loads {address} from the network: copy the file into docs/."
            for address in page.loaded
            if is_external(address)
        ]
        if name.name != "404.html":  # its links start at the root of a server
            problems += [
                f"{name} links to {address}, which does not exist."
                for address in dict.fromkeys(page.loaded + page.links)
                if not is_external(address) and not _resolves(path, address, pages)
            ]
    for style in sorted(site.rglob("*.css")):
        for address in STYLE_ADDRESS.findall(style.read_text(encoding="utf-8")):
            problems.append(f"{style.relative_to(site)} loads {address} from the network.")
    return problems


def _resolves(path: Path, address: str, pages: dict[Path, _Links]) -> bool:
    if address.startswith(("data:", "mailto:", "javascript:")):
        return True
    file, anchor = urldefrag(address)
    target = (path.parent / unquote(file)).resolve() if file else path
    if target.is_dir():
        target /= "index.html"
    if target not in pages:
        return target.is_file()
    return unquote(anchor) in pages[target].anchors
