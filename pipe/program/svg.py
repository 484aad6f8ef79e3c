"""A timeline as SVG text, which a notebook shows: a row for each rank, a box for each op with its microbatch."""

from __future__ import annotations

from html import escape

from .colors import NAMES, color
from .timeline import Timeline, together

_ROW, _BOX, _LEFT, _DIGIT = 26, 20, 54, 7  # pixels: heights, width of the ranks' names and of a digit
_WIDEST = 1400


def svg(times: Timeline, title: str) -> str:
    """Return a picture of a timeline. The box of an op has its name as tooltip; the ops of a pair share their time."""
    spans = [span for rows in (times.rows, times.transfers) for row in rows for span in row]
    begin, end = min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=1.0)
    stages, ranks = 1 + max((span.op.stage for span in spans), default=0), len(times.rows)
    digits = len(str(max((span.op.microbatch for span in spans), default=0)))
    shortest = min((s.end - s.start for s in spans if s.end > s.start), default=end - begin)
    scale = min((digits + 1) * _DIGIT / shortest, (_WIDEST - _LEFT) / (end - begin))  # pixels per unit of time
    width, height = max(480.0, _LEFT + (end - begin) * scale), 24 + ranks * _ROW + 24
    parts = [f'<text x="0" y="14">{escape(title)}</text>']
    for rank in range(ranks):
        top = 24 + rank * _ROW
        parts.append(f'<text x="0" y="{top + 14}">rank {rank}</text>')
        boxes = [
            (span, top + i * _BOX / len(group), _BOX / len(group))
            for group in together(times.rows[rank])
            for i, span in enumerate(group)
        ]
        boxes += [(span, top + _BOX, 4.0) for span in (times.transfers[rank] if times.transfers else ())]
        for span, y, tall in boxes:
            x, wide = _LEFT + (span.start - begin) * scale, (span.end - span.start) * scale
            fill, number = color(span.op, stages, ranks), str(span.op.microbatch)
            parts.append(f'<g><title>{span.op}</title><rect x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{tall:g}"')
            parts.append(f'fill="{fill}" stroke="white" stroke-width="0.5"/>')
            if tall >= _BOX / 2 and wide >= len(number) * _DIGIT:
                ink, size = "white" if int(fill[3:5], 16) < 150 else "black", min(12, tall - 1)
                middle = f'x="{x + wide / 2:.1f}" y="{y + tall / 2 + size / 3:.1f}" text-anchor="middle"'
                parts.append(f'<text {middle} fill="{ink}" font-size="{size:g}">{number}</text>')
            parts.append("</g>")
    x = float(_LEFT)
    for kind, name in NAMES.items():
        if (op := next((span.op for span in spans if span.op.kind == kind), None)) is not None:
            fill = color(op._replace(stage=0), stages, ranks)
            parts.append(f'<rect x="{x:g}" y="{height - 17}" width="12" height="12" fill="{fill}"/>')
            parts.append(f'<text x="{x + 16:g}" y="{height - 7}">{name}</text>')
            x += 30 + len(name) * _DIGIT
    if stages > ranks:
        parts.append(f'<text x="{x:g}" y="{height - 7}">dark: a rank\'s first stage, light: its last</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
    return f'{head} style="background: white" font-family="sans-serif" font-size="12">{" ".join(parts)}</svg>'
