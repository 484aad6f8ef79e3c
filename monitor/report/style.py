"""Style sheet and script of the report. The colors are Okabe and Ito's, which color-blind readers can distinguish."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #5c6670; --rule: #d8dde3; --panel: #f6f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #9a5d8c; --F: #0072b2; --B: #d55e00; --I: #d55e00; --W: #7b6f93;
  --optimizer: #9a5d8c; --tensor: #e69f00; --data: #009e73; --world: #56b4e9; --idle: #e9ecf0; --host: #9aa3ad;
  --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --rule: #343a41;
  --panel: #1d2125; --c0: #56b4e9; --c1: #e8803a; --c2: #2fc39a; --c3: #cc79a7; --F: #2b87c4; --B: #cf6a1c;
  --I: #cf6a1c; --W: #8d80a8; --optimizer: #b86a97; --data: #12a57d; --idle: #262b30; --host: #717b86; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 38px 0 8px; padding-top: 10px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 14px 0 2px; font-weight: 600; }
h3 small, .soft { color: var(--soft); font-weight: 400; font-size: 13px; }
p { margin: 4px 0 10px; max-width: 78ch; } h1 + p { max-width: none; }
a { color: var(--c0); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 16px 0; }
.tile { background: var(--panel); border-radius: 8px; padding: 9px 12px; }
.tile b { display: block; font-size: 21px; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.stopped { border-left: 4px solid var(--c1); padding: 2px 12px; background: var(--panel); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 12px 28px; }
.chart { min-width: 0; position: relative; }
.chart.wide { grid-column: 1 / -1; }
svg { display: block; max-width: 100%; height: auto; }
svg.n { display: none; }
.scroll { overflow-x: auto; padding-bottom: 4px; }
.scroll svg { max-width: none; }
svg text { font: 12px system-ui, "Liberation Sans", sans-serif; fill: var(--soft); }
svg .name { fill: var(--ink); }
svg .on { fill: var(--on); text-anchor: middle; font-size: 11px; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--soft); fill: none; }
.level { stroke: var(--soft); stroke-dasharray: 5 4; fill: none; }
.line { fill: none; stroke-width: 1.4; stroke-linejoin: round; } .line.main { stroke-width: 2.2; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.dot { stroke: none; } .dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); }
.hair { stroke: var(--soft); stroke-dasharray: 2 3; }
.tip { position: absolute; pointer-events: none; background: var(--page); border: 1px solid var(--rule);
  border-radius: 6px; padding: 4px 8px; font-size: 12px; white-space: nowrap; z-index: 2; display: none; }
rect.b { stroke: var(--page); stroke-width: .6; } rect.idle { fill: var(--idle); }
.F { fill: var(--F); background: var(--F); } .B { fill: var(--B); background: var(--B); }
.I { fill: var(--I); background: var(--I); } .W { fill: var(--W); background: var(--W); }
.optimizer { fill: var(--optimizer); background: var(--optimizer); }
.tensor { fill: var(--tensor); background: var(--tensor); } .data { fill: var(--data); background: var(--data); }
.world { fill: var(--world); background: var(--world); } .host { fill: var(--host); background: var(--host); }
.tied { fill: #f0e442; background: #f0e442; } .idle { background: var(--idle); }
.send { fill: var(--ink); background: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); margin: 4px 0 8px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.legend i.level { height: 0; border-top: 2px dashed var(--soft); vertical-align: 4px; width: 16px; }
.legend i.thin { height: 5px; vertical-align: 2px; } .legend i.c0 { background: var(--c0); }
.legend i.c1 { background: var(--c1); } .legend i.c2 { background: var(--c2); } .legend i.c3 { background: var(--c3); }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 4px 12px; align-items: center;
  font-size: 13px; }
.bar { display: flex; height: 20px; background: var(--idle); border-radius: 3px; overflow: hidden; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--c0); padding: 6px 0; }
pre { background: var(--panel); padding: 12px; border-radius: 8px; overflow-x: auto; font: 12px/1.45 monospace; }
@media (max-width: 700px) {
  main { padding: 14px 14px 40px; } .charts { grid-template-columns: 1fr; } h1 { font-size: 22px; }
  svg.w { display: none; } svg.n { display: block; }
  th:first-child, td:first-child { white-space: normal; min-width: 118px; position: sticky; left: 0;
    background: var(--page); } th, td { padding: 4px 8px; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 18px; }
}
@media print { details > * { display: block; } .chart, table { break-inside: avoid; } }
"""

# Shows a hairline and the numbers of the nearest step under the pointer.
SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const holder = chart.querySelector('script'); if (!holder) continue;
  const lines = JSON.parse(holder.textContent), tip = chart.querySelector('.tip');
  for (const svg of chart.querySelectorAll('svg')) {
    const d = svg.dataset, x0 = +d.x0, x1 = +d.x1, left = +d.left, right = +d.right;
    const hair = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    hair.setAttribute('class', 'hair'); svg.append(hair);
    const hide = () => { tip.style.display = 'none'; hair.setAttribute('d', ''); };
    svg.addEventListener('pointerleave', hide);
    svg.addEventListener('pointermove', event => {
      const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal, scale = view.width / box.width;
      const inner = view.width - left - right;
      const x = x0 + ((event.clientX - box.left) * scale - left) / inner * (x1 - x0);
      let best = null;
      for (const line of lines) for (const p of line.points)
        if (best === null || Math.abs(p[0] - x) < Math.abs(best - x)) best = p[0];
      if (best === null) return hide();
      const rows = lines.map(line => [line.name, line.points.find(p => p[0] === best)]).filter(row => row[1]);
      const u = left + (x1 > x0 ? (best - x0) / (x1 - x0) : .5) * inner;
      hair.setAttribute('d', `M${u} 10V${view.height - 36}`);
      tip.textContent = `step ${best}: ` + rows.map(row => `${row[0]} ${+row[1][1].toPrecision(5)}`).join(', ');
      tip.style.display = 'block';
      const across = u / scale, room = chart.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(across + 8, room))}px`;
      tip.style.top = `${box.top - chart.getBoundingClientRect().top - 4}px`;
    });
  }
}
"""
