"""Makes docs/results.md from the cells in docs/results. Run it after cells were added.

    python tools/results.py

The section of a table has the cells that were run, how many were not, their dates, the command, and the remarks in
NAME.md next to its cells. `--check` fails if the page is not up to date. `--add FOLDER` first adds the cells of runs
that `datalens reproduce --full --out FOLDER` made.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from datalens.reproduce import harness, shortfalls
from datalens.reproduce.cells import Table
from datalens.reproduce.kept import keep_cell, read_cells

RESULTS, PAGE = Path("docs/results"), Path("docs/results.md")
HEAD = """# Results

*For experts: figures beside the paper's. [evaluation.md](evaluation.md) says how to measure your own set.*

Made by `python tools/results.py` from the cells in `docs/results/`, one JSON line each. Those of tables 1 to 5, 7 and
12, figure 4, utility and ablation are runs, with settings, versions, ε, δ, relation, accountant and the hash of their
certificate (runs themselves are not kept: a certificate is checked where its release lies). Where a cell says torch
2.11 it was run on one NVIDIA H200, where it says 2.13, on two CPU cores; `datalens: not installed` is our source tree
there. `datalens reproduce NAME --full --from docs/results` makes one table from them; without
`--from`, what is missing is run, and with `--stale` also what older code made. `datalens reproduce all --quick` runs a
small, labelled version of everything but the rows of CelebA and Places365 (17 min 32 s on two cores on 2026-11-16, when
it had four tables less). Accuracies, scores and distances are measured on real data: not covered by ε. No setting was
chosen on test data.

Elsewhere: what our default reaches, and how, in [utility.md](utility.md); what was found about DP-SGD (tables 8 to 11,
figure 3) in [dpsgd.md](dpsgd.md); what makes an epoch fast in [benchmarks.md](benchmarks.md); Theorem 6 in
[theory.md](theory.md).
"""


def page() -> str:
    tables = harness.tables()
    names = [name for name in harness.listing() if name != "theory"]  # Theorem 6 has a page of its own
    return "\n".join([HEAD, short(), *(section(n, tables[n]) if n in tables else other(n) for n in names)])


def short() -> str:
    return (
        "## What falls short of the paper\n\n"
        "Counted from the cells below by `reproduce/shortfalls.py`: figures that the paper prints, those that were "
        "run, and those that are worse. A printed figure is of a best epoch, chosen on test data, and mostly of a best "
        "setting; ours are of last epochs. Tables 8 to 11 in percent, 3 and 12 in Inception Scores and distances "
        "(FID), all others in parts of the test images. The last column counts cells that were not run, and says what "
        "they need; `datalens reproduce NAME --full` runs them.\n\n"
        + shortfalls.markdown(shortfalls.lines(harness.tables(), RESULTS))
    )


def section(name: str, table: Table) -> str:
    cells = table.cells(True)
    stored = read_cells(RESULTS / f"{table.kept_as or name}.jsonl")
    results = shortfalls.results_of(table, stored)
    lines = [f"## {table.title}", ""]
    if not results:
        return "\n".join([*lines, f"Not run yet: `datalens reproduce {name} --full`.", ""])
    run = [cell for cell in cells if cell.name in results]
    rows = table.rows(run, results)
    dates = sorted({result["date"] for result in results.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    old = sum(result["stale"] is not None for result in results.values())
    hours = "not run: needs a GPU" if name in ("table3", "table12") else None  # the judge and Inception-v3
    left = Counter(hours or cell.not_run for cell in cells if cell.name not in results)
    rest = f" Not run: {', '.join(missing(left))}." if left else ""
    lines += [
        f"`datalens reproduce {name} --full`, {when}; {len(run)} of {len(cells)} cells have been run, {old} of them "
        f"stale.{rest}",
        "",
        table.said(True),
        "",
        table.markdown(rows),
    ]
    if (RESULTS / f"{name}.png").exists():
        lines += [f"![{table.title}](results/{name}.png)", ""]
    remarks = RESULTS / f"{name}.md"
    return "\n".join(lines) + (f"\n{remarks.read_text(encoding='utf-8')}" if remarks.exists() else "")


def missing(left: Counter[str]) -> list[str]:
    """Return how many cells were not run, for each reason that is known, such as "3 that need a GPU"."""
    said = {"not run: needs a GPU": " that need a GPU", "not run: needs --data-folder": " that need --data-folder"}
    said |= {"not run: up to 47 minutes of two cores": " that take up to 47 minutes of two cores each"}
    return [f"{count}{said.get(why, ' others')}" for why, count in sorted(left.items(), reverse=True)]


def other(name: str) -> str:
    """Return the section of a table or figure that is not made of such cells: as `reproduce --from` writes it."""
    with tempfile.TemporaryDirectory() as out:
        how: dict[str, Any] = {"full": True, "out": Path(out), "device": "cpu", "stored": RESULTS}
        made = Path(harness.reproduce(name, **how)["markdown"]).read_text(encoding="utf-8")
    title, body = harness.listing()[name], made.replace("\n## ", "\n### ").split("\n", 1)[1]
    if name == "figure3":  # its rows are those of Table 8, and those of one curve more
        lines = body.split("\n")
        body = "\n".join(line for line in lines if line[:5] in ("| row", "|---|") or line[:1] != "|" or "DPDL" in line)
        body += "\nThe other curves are the rows of Table 8.\n"
    picture = f"\n![{title}](results/{name}.png)\n" if (RESULTS / f"{name}.png").exists() else ""
    remarks = RESULTS / f"{name}.md"
    said = f"\n{remarks.read_text(encoding='utf-8')}" if remarks.exists() else ""
    return f"## {title}\n\n`datalens reproduce {name} --full`\n{body}{picture}{said}"


def plots() -> None:
    """Write the plots of all tables that have finished cells."""
    run = [name for name, table in harness.tables().items() if (RESULTS / f"{table.kept_as or name}.jsonl").exists()]
    for name in (*run, "figure2", "figure3", "theory"):
        with tempfile.TemporaryDirectory() as out:
            made = harness.reproduce(name, full=True, out=Path(out), device="cpu", stored=RESULTS)
            (RESULTS / f"{name}.png").write_bytes(Path(made["plot"]).read_bytes())


def add(folder: Path) -> None:
    """Add the cells of full runs, FOLDER/NAME-full/cells.jsonl, to the kept ones."""
    for path in sorted(folder.glob("*-full/cells.jsonl")):
        name = path.parent.name.removesuffix("-full")
        for cell, result in read_cells(path).items():
            picture = {"picture": Path(result["picture"]).read_bytes()} if "picture" in result else {}
            keep_cell(RESULTS / f"{name}.jsonl", cell, result | picture)
        print(f"{path} → {RESULTS / f'{name}.jsonl'}")


def main() -> None:
    if "--add" in sys.argv:
        add(Path(sys.argv[sys.argv.index("--add") + 1]))
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is not up to date: {sys.argv[0]}")
    plots()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
