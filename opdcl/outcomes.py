"""What the verbs of `opdcl.api` return: the command line prints it, a notebook shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import OpdclError, typed
from opdcl.results.format import Table
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import Finding, verify
from opdcl.sanitize import readable

if TYPE_CHECKING:
    from opdcl.results.compare import Compared
    from opdcl.results.estimates import Summary


@dataclass(repr=False)
class Outcome:
    """What a verb returns: a sentence, tables, notes, and plain data. A notebook shows it as HTML.

    `faults` invalidate the result, `remarks` qualify it, and `notes` suggest the next command.
    """

    sentence: str
    tables: Sequence[Table]
    data: Any
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    brief: Sequence[Table] = ()
    """Tables that take the place of `tables`, and of all sentences but the first, unless all is asked for."""
    more: str = ""
    """The command that shows all, if there is more than `brief`."""
    severity: str = ""
    """How good it is: good, mixed, bad, or nothing where that is open."""

    def __post_init__(self) -> None:
        # The notes of a run repeat its faults, for readers of the JSON.
        self.remarks = [remark for remark in self.remarks if remark not in self.faults]

    def __repr__(self) -> str:
        first = self.sentence.split("\n")[0]
        return f"<opdcl: {readable(first)}>"

    def _repr_html_(self) -> str:
        parts = [f"<p><strong>Fault:</strong> {_html(fault)}</p>" for fault in self.faults]
        first, *further = self.sentence.split("\n")
        parts.append(f"<p><strong>{_html(first)}</strong></p>")
        parts += [f"<p>{_html(line)}</p>" for line in further]
        for table in self.tables:
            head = "".join(f"<th>{_html(column)}</th>" for column in table.columns)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>")
            for cells in table.rows:
                row = "".join(f"<td>{_html(cell)}</td>" for cell in cells)
                parts.append(f"<tr>{row}</tr>")
            parts.append("</tbody></table>")
        parts += [f"<p>{_html(remark)}</p>" for remark in self.remarks]
        return "".join(parts)

    def refuse(self) -> None:
        """Raise an error if there is a fault, so that no script takes the result for a good one.

        Raises: OpdclError: there is at least one.
        """
        if self.faults:
            count = "a fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            raise OpdclError(f"do not trust these results: they have {count}", self._remedy())

    def _remedy(self) -> str:
        return "measure again what the faults name, or leave it out"


def _html(text: str) -> str:
    return escape(readable(text)).replace("\n", "<br>")


class Plan(Outcome):
    """What a run would do; `data` has the keys of `--dry-run --json`."""


class Result(Outcome):
    """The results so far of the run in `path`; `summary` has the keys of `opdcl report RUN --json`."""

    def __init__(self, path: Path, results: Summary, gates: Sequence[dict[str, str]] = ()):
        from opdcl.results.render import run_document
        from opdcl.results.sections import brief_table, main_tables
        from opdcl.results.verdict import at_place

        place = typed(path)
        results = at_place(results, place)
        self.path, self.gates = path, [*gates]
        self.summary: dict[str, Any] = run_document(results)
        if gates:
            self.summary["gates"] = self.gates
        report = [f"report: {self.report}"] if results.suites else []
        super().__init__(
            sentence="\n".join([results.verdict.text, *results.verdict.further]),
            tables=main_tables(results),
            data=self.summary,
            notes=[*report, f"next: {results.verdict.lead_on}"],
            faults=results.faults,
            remarks=results.notes,
            brief=brief_table(results),
            more=f"opdcl report {place} --all",
            severity=results.verdict.severity,
        )

    def pull_request(self) -> str:
        """Return the results as about thirty lines of Markdown: faults, verdict, gates, table, prompts."""
        from opdcl.results.render import pull_request

        return pull_request(RunDir(self.path), self.gates)

    def refuse(self) -> None:
        """Raise the error of the gates that are not met, or of the faults.

        Raises: GateError: one is missed. InconclusiveError: the scores do not decide one. OpdclError: there
            is a fault.
        """
        from opdcl.results.gates import refuse

        refuse(self.gates, typed("opdcl", "report", self.path))
        super().refuse()

    def _remedy(self) -> str:
        if all(finding.ok for finding in verify(RunDir(self.path))):
            # What is wrong is what was measured, not the files that hold it.
            return "train longer, or at a higher rate, until tuned answers otherwise than base"
        check = typed("opdcl", "verify", self.path)
        return f"{check}  # checks the files; restore them, or measure again"

    @property
    def report(self) -> Path:
        """The path of report.html."""
        return RunDir(self.path).reports[1]

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters' folders by state: `tuned`, `recovered`."""
        return RunDir(self.path).adapters()


class Comparison(Outcome):
    """Runs side by side; `data` has the keys of compare.json, and `path` is the folder it is in, if any."""

    def __init__(self, comparison: Compared, path: Path | None = None):
        from opdcl.results.compare import comparison_page, plain

        self.path = path
        page = comparison_page(comparison)
        scores, *others = page.sections
        # A status takes several lines, so that the table fits a terminal of 80 columns.
        rows = scores.rows
        if scores.columns[-1] == "status":
            rows = [[*cells, status.replace(" ", "\n")] for *cells, status in rows]
        tables = [scores._replace(title="", rows=rows), *others]
        super().__init__(
            sentence=page.verdict.heading,
            tables=tables,
            data=plain(comparison),
            notes=[page.verdict.sentence],
            faults=page.faults,
            remarks=page.notes,
        )

    def runs(self) -> list[Path]:
        """Return the run directories in the comparison's folder."""
        return sorted(file.parent for file in self.path.glob("*/report.html")) if self.path else []


class Verification(Outcome):
    """The checks of a run's files; `failed` names those that do not hold."""

    def __init__(self, findings: Sequence[Finding]):
        self.failed = [f.what for f in findings if not f.ok]
        rows = [[f.what, f.finding] for f in findings if not f.ok]
        tables = [Table("", ["what is wrong", "finding"], rows, "")] if rows else []
        bad, total = len(self.failed), len(findings)
        sentence = f"{bad} of {total} checks failed" if bad else f"all {total} checks hold"
        super().__init__(sentence, tables, [vars(f) for f in findings])
