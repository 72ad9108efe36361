"""What an audit found, as a file, as a few lines and as a page.

`Certificate.to_dict` is the file; the page is made of the same values, so the two cannot disagree.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from heads.checkpoint import update_card


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim, tested. `detail` says in a line or more what was measured and, where it failed, where; `figures`
    hold the same in numbers."""

    name: str
    passed: bool
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The checks of one head with one target on one machine, and `facts` that tell which those were."""

    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: `passed`, `checks` of name, passed and detail, the facts, and `figures` by check."""
        return {
            "passed": self.passed,
            "checks": [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in self.checks],
            **self.facts,
            "figures": {check.name: dict(check.figures) for check in self.checks},
        }

    def summary(self) -> dict[str, Any]:
        """What a head's card keeps of it: the outcome, the facts and each check's detail."""
        checks = {check.name: {"passed": check.passed, "detail": check.detail} for check in self.checks}
        return {"passed": self.passed, **self.facts, "checks": checks}


def save_to_card(folder: Path, certificate: Certificate) -> None:
    """Keep the summary on the card of a saved head."""
    update_card(folder, certificate=certificate.summary())


def save_page(path: Path, certificate: Certificate) -> None:
    """Write the certificate for people: Markdown for a name ending in .md, else one HTML file with nothing outside."""
    sections = list(_sections(certificate))
    text = _markdown(certificate, sections) if path.suffix.lower() == ".md" else _html(certificate, sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class _Table(NamedTuple):
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


class _Section(NamedTuple):
    """A check, or the facts, with the tables below its detail."""

    title: str
    passed: bool | None
    detail: str
    tables: Mapping[str, _Table]


def _sections(certificate: Certificate) -> Iterator[_Section]:
    for check in certificate.checks:
        yield _Section(check.name, check.passed, check.detail, dict(_tables(check.figures)))
    rows = [(name.replace("_", " "), _cell(value)) for name, value in _flat(certificate.facts)]
    yield _Section("what was audited, where and when", None, "", {"": _Table(("", ""), rows)})


def _tables(figures: Mapping[str, Any]) -> Iterator[tuple[str, _Table]]:
    """Single figures as one table, then each list of records as a table of its own."""
    single = [(name.replace("_", " "), _cell(value)) for name, value in figures.items() if not isinstance(value, list)]
    if single:
        yield "", _Table(("", ""), single)
    for name, value in figures.items():
        if _is_records(value):
            columns = tuple(dict.fromkeys(column for record in value for column in record))
            rows = [[_cell(record.get(column, "")) for column in columns] for record in value]
            yield name.replace("_", " "), _Table(tuple(column.replace("_", " ") for column in columns), rows)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {key}", inner) for key, inner in _flat(value))
        else:
            yield name, value


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _title(certificate: Certificate) -> str:
    return f"{certificate.facts.get('head', 'a head')} on {certificate.facts.get('target', 'a target')}"


def _verdict(certificate: Certificate) -> str:
    failed = [check.name for check in certificate.checks if not check.passed]
    if not failed:
        return f"Passed: all {len(certificate.checks)} checks."
    return f"Not passed: {', '.join(failed)}."


def _markdown(certificate: Certificate, sections: Sequence[_Section]) -> str:
    lines = [f"# Audit of {_title(certificate)}", "", f"**{_verdict(certificate)}**"]
    for section in sections:
        mark = "" if section.passed is None else " (passed)" if section.passed else " (NOT passed)"
        lines += ["", f"## {section.title}{mark}"]
        lines += ["", *(f"{line}  " for line in section.detail.splitlines())] if section.detail else []
        for title, table in section.tables.items():
            lines += ["", f"**{title}**"] if title else []
            lines += ["", _markdown_row(table.columns), _markdown_row(["---"] * len(table.columns))]
            lines += [_markdown_row(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
.verdict { font-size: 1.1rem; font-weight: 600; } .yes { color: #176b2c; } .no { color: #b3261e; }
.mark { display: inline-block; width: 6.5rem; font-weight: 600; }
p { white-space: pre-line; margin: .3rem 0; }
details { margin: .5rem 0; } summary { cursor: pointer; color: #444; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .4rem 0; }
td, th { border-bottom: 1px solid #ddd; padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616; } .yes { color: #6fcf87; }
.no { color: #ff8a80; } td, th { border-color: #3a3a3a; } summary { color: #b0b0b0; } }
"""


def _html(certificate: Certificate, sections: Sequence[_Section]) -> str:
    title = html.escape(f"Audit of {_title(certificate)}")
    tone = "yes" if certificate.passed else "no"
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f'<h1>{title}</h1>\n<p class="verdict {tone}">{html.escape(_verdict(certificate))}</p>',
    ]
    for section in sections:
        parts.append(f"<h2>{_mark(section.passed)}{html.escape(section.title)}</h2>")
        if section.detail:
            parts.append(f"<p>{html.escape(section.detail)}</p>")
        for name, table in section.tables.items():
            summary = html.escape(f"{name} ({len(table.rows)})" if name else "figures")
            shown = " open" if section.passed is None else ""
            parts.append(f"<details{shown}><summary>{summary}</summary>{_html_table(table)}</details>")
    return "\n".join([*parts, "</body>\n</html>\n"])


def _mark(passed: bool | None) -> str:
    if passed is None:
        return ""
    return '<span class="mark yes">passed</span>' if passed else '<span class="mark no">NOT passed</span>'


def _html_table(table: _Table) -> str:
    header = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    head = f"<tr>{header}</tr>" if any(table.columns) else ""
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table>{head}{rows}</table>"
