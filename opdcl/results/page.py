"""A page: what a run or a comparison shows, as one value, and its rendering as HTML and as Markdown."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from opdcl.results import format
from opdcl.results.samples import RULE, Group, PickedExample
from opdcl.results.status import STATES
from opdcl.results.tables import MISSING, Table
from opdcl.sanitize import harmless

FILTERS = (format.percent, format.value, format.code, format.fence, format.quoted, format.nats)


@dataclass(frozen=True)
class Page:
    """What a run or a comparison shows; each form takes what it has room for."""

    name: str
    heading: str
    """The verdict's first words, or what a comparison has found."""
    sentence: str
    sections: list[Table]
    details: list[Table]
    """Tables that few readers look up."""
    faults: list[str]
    notes: list[str]
    """They begin with the faults."""

    verdict: str = ""
    """Heading and sentence of a run in one."""
    further: list[str] = field(default_factory=list)
    """The sentences after the verdict, without what to do."""
    to_do: str = ""
    next: str = ""
    severity: str = ""
    ratios: list[dict[str, str]] = field(default_factory=list)
    """R and D: name, meaning, value and bounds, or why there is none."""
    bars: list[dict[str, Any]] = field(default_factory=list)
    about_base: list[str] = field(default_factory=list)
    """What is special about the weights that the scores are of."""
    made: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    """What it takes to repeat the run."""
    examples: list[PickedExample] = field(default_factory=list)
    answers: dict[str, list[Group]] = field(default_factory=dict)
    """Suite -> all its prompts, by what became of them."""
    model: dict[str, Any] = field(default_factory=dict)
    """What the card says about the adapter: state, place, licence, opdcl's version, the model that it is for;
    the base that this is a fine-tune `of`, if it is one, and the id of an `embedded` base."""


def render_page(template: str, page: Page, **more: Any) -> str:
    """Render a page as `md` or `html`, with what only this form shows."""
    return _environment(template.endswith(".html")).get_template(f"{template}.j2").render(page=page, **more)


@functools.cache
def _environment(is_html: bool) -> jinja2.Environment:
    """Return the templates of one kind; strings are escaped unless they are `Markup`."""
    escape = harmless if is_html else format.markdown

    def safe(value: Any) -> Any:
        return escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        finalize=safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for filter in FILTERS:
        environment.filters[filter.__name__] = lambda value, format=filter: Markup(format(value))
    environment.filters["unbroken"] = format.unbroken
    environment.globals |= {"states": STATES, "missing": MISSING, "sample_rule": RULE}
    return environment
