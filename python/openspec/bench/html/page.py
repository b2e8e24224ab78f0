"""One HTML file that shows benchmarks: charts as SVG, no script, nothing from elsewhere.

Every number comes from the JSON document and carries its place there as `data-v`, such as
`0/runs/3/ttft_ms` for the first document.
"""

from __future__ import annotations

from collections.abc import Sequence

from openspec.bench.document import Document
from openspec.bench.html.charts import budgets, latencies, positions
from openspec.bench.html.summary import commands, environments, heading, speedups, tiles
from openspec.bench.html.svg import STYLE, words
from openspec.bench.html.tables import comparison, sources, tables
from openspec.bench.palette import INK

_PAGE_STYLE = """
:root { color-scheme: light dark }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 3rem 1.5rem 4rem; max-width: 66rem; background: var(--ground);
  color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-print-color-adjust: exact; print-color-adjust: exact }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 3rem 0 .2rem }
h3 { font-size: .95rem; margin: 1.4rem 0 .4rem }
p { margin: .3rem 0 .9rem; max-width: 46rem }
header p { max-width: none }
.quiet { color: var(--quiet) }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 1.6rem 0; background: var(--line);
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden }
.tile { flex: 1 1 11rem; padding: .9rem 1.1rem; background: var(--ground) }
.tile b { display: block; font-size: 1.55rem; font-weight: 600; line-height: 1.3 }
.tile > span { color: var(--quiet); font-size: .85rem }
.verdict { border-left: 3px solid var(--s3); padding-left: .8rem }
.verdict.no { border-color: var(--s2); font-weight: 600 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .84rem; margin: .6rem 0 }
th, td { padding: .16rem .48rem; text-align: right; white-space: nowrap }
th { font-weight: 600; vertical-align: bottom }
thead th { border-bottom: 1px solid var(--quiet) }
.dense :is(th, td) { padding: .16rem .38rem }
td.w, th.w { text-align: left }
tr.first > * { border-top: 1px solid var(--line) }
summary { color: var(--quiet); cursor: pointer; font-size: .87rem }
td.strong { font-weight: 600 } td .quiet { font-weight: 400 }
.charts { display: flex; flex-wrap: wrap; gap: 1.4rem 2rem; margin: .8rem 0 }
.chart { max-width: 100%; height: auto }
.tint { display: inline-block; padding: 0 .5em; border-radius: 3px }
pre { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.4rem; font-size: .87rem }
dt { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 2rem }
@media screen and (max-width: 44rem) {
  .charts { overflow-x: auto; flex-wrap: nowrap; scroll-snap-type: x proximity }
  .chart { max-width: none; flex: none; scroll-snap-align: start }
}
@page { margin: 13mm 12mm }
@media print {
  body { padding: 0; max-width: none; font-size: 11px }
  h2 { margin-top: 1.6rem }
  .chart, tr, .tiles, pre { break-inside: avoid } h2, h3, h2 + p { break-after: avoid }
  tr:nth-last-child(-n + 4) { break-before: avoid }
  .scroll { overflow: visible }
  table { font-size: 9px } thead th { white-space: normal }
  :is(table, .dense) :is(th, td) { padding: .1rem .28rem }
  .charts { gap: 1rem 2rem } .charts > .chart:not(:only-child) { max-width: calc(50% - 1rem) }
  .sides { grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)) }
  dl { font-size: 9px; line-height: 1.3 }
}
"""


def report_page(documents: Sequence[Document]) -> str:
    """The page of one document, or of two beside each other."""
    title, subtitle = heading(documents)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{words(title)}</title>",
        f"<style>{STYLE}{_PAGE_STYLE}.tint {{ color: {INK} }}</style></head><body>",
        f"<header><h1>{words(title)}</h1>",
        *(f'<p class="quiet">{words(line)}</p>' for line in subtitle),
        "</header><main>",
        *(part for part in _main(documents) if part),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _main(documents: Sequence[Document]) -> list[str]:
    if len(documents) == 2:
        first, second = documents
        top = [comparison(first, second)]
    else:
        top = [tiles(documents[0]), speedups(documents[0])]
    return [
        *top,
        tables(documents),
        sources(documents),
        positions(documents),
        latencies(documents),
        budgets(documents),
        commands(documents),
        environments(documents),
    ]
