"""``triax report``: a run's folder as one HTML page without network access.

write.py       finds the run and writes the page
run_folder.py  reads metrics.jsonl, run.json, timeline.json and logs
page.py        sections of the page: summary, curves, timelines, memory, traffic, configuration
elements.py    HTML elements: chart, table, legend
svg.py         line charts and timelines as SVG
style.py       style sheet and script
"""
