"""``triax report``: a run's folder as one HTML page without network access.

write.py       finds the runs and writes the page
serve.py       serves the page on this machine while the run goes on
run_folder.py  reads metrics.jsonl, run.json, timeline.json and logs
membership.py  reads the history of replicas that come and go: time lost by cause, goodput
page.py        values of the page: summary, curves, timelines, memory, traffic, configuration; of several runs, compared
svg.py         coordinates of line charts and timelines
pictures.py    loss.png, schedule.png; draw_run writes them and the page into the run's folder
page.html      Jinja2 template of the page, with its style sheet and script
"""
