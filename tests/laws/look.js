// Faults of the page in the window, each as [kind, element, numbers], and what look.py compares: the page's links and
// ids, its scrolling boxes, its height. look.py runs this in every page, at every width, light and dark.
(() => {
  const faults = [], boxes = [], root = document.documentElement, width = root.clientWidth;
  const styleOf = node => getComputedStyle(node);
  const shown = node => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const ancestors = function* (node) { for (; node; node = node.parentElement) yield node; };
  const words = node => node.textContent.trim().replace(/\s+/g, ' ').slice(0, 40);
  const name = node => {
    const classes = [...node.classList].slice(0, 2).map(each => `.${each}`).join('');
    return `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : classes} "${words(node) || node.src || ''}"`;
  };
  const fault = (kind, node, numbers) => faults.push([kind, node ? name(node) : '', numbers]);

  // A color as [red, green, blue, alpha], each up to 255: the browser reads every notation.
  const pixel = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true }), read = new Map();
  const rgba = text => {
    if (!read.has(text)) {
      pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = text; pixel.fillRect(0, 0, 1, 1);
      read.set(text, [...pixel.getImageData(0, 0, 1, 1).data]);
    }
    return read.get(text);
  };
  const over = (top, under, opacity = 1) => {
    const part = opacity * top[3] / 255;
    return [0, 1, 2].map(i => part * top[i] + (1 - part) * under[i]);
  };
  const luminance = color => {
    const [r, g, b] = color.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.backgroundColor = 'Canvas';
  const canvas = rgba(styleOf(probe).backgroundColor);
  probe.remove();
  const ground = node => {
    const layers = [...ancestors(node)].map(each => rgba(styleOf(each).backgroundColor)).filter(color => color[3]);
    return layers.reverse().reduce((under, top) => over(top, under), canvas);
  };

  // ---- the page as a whole
  if (!/width\s*=\s*device-width/.test(document.querySelector('meta[name=viewport]')?.content))
    fault('no viewport', null, 'a phone shows the page 980 px wide');
  const page = ground(document.body);
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  if (dark && luminance(page) > 0.2)
    fault('no dark theme', document.body, `background rgb(${page.map(Math.round)})`);
  const fixed = node => [...ancestors(node)].some(each => styleOf(each).position === 'fixed');
  const held = node => [...ancestors(node.parentElement)].some(each =>
    each !== document.body && each !== root && styleOf(each).overflowX !== 'visible');
  if (root.scrollWidth > width) {
    const out = [...document.body.querySelectorAll('*')].filter(node =>
      shown(node) && node.getBoundingClientRect().right > width + 1 && !held(node) && !fixed(node));
    const inner = out.filter(node => !out.some(other => other !== node && node.contains(other)));
    for (const node of inner.slice(0, 5)) fault('page too wide', node, `${root.scrollWidth} px in ${width}`);
    if (!inner.length) fault('page too wide', document.body, `${root.scrollWidth} px in ${width}`);
  }

  // ---- boxes that scroll, and text that is cut
  const side = [...document.querySelectorAll('.toc-drawer')].filter(shown).map(node => node.getBoundingClientRect().left);
  const room = Math.min(width, ...side.filter(left => left > 0)) - 16;
  for (const node of document.body.querySelectorAll('*')) {
    const style = styleOf(node), { left, top, width: wide, height } = node.getBoundingClientRect();
    if (node.clientWidth < 8 || height < 8 || !node.innerText?.trim() || !shown(node)) continue;
    const more = node.scrollWidth - node.clientWidth, numbers = `${node.scrollWidth} px in ${node.clientWidth}`;
    if (more > 1 + parseFloat(style.paddingRight) * /auto|scroll/.test(style.overflowX)) {  // more than empty padding
      if (/auto|scroll/.test(style.overflowX)) {
        boxes.push([name(node), left + scrollX, top + scrollY, wide, height, ground(node), numbers]);
        if (left >= 0 && left + node.scrollWidth <= room)
          fault('cut beside an empty margin', node, `${numbers}; ${Math.round(room - left)} px are there`);
      } else if (/hidden|clip/.test(style.overflowX)) fault('text cut', node, numbers);
      else if (/^(TD|TH|LI|P)$/.test(node.tagName)) fault('text wider than its box', node, numbers);
    }
    if (/hidden|clip/.test(style.overflowY) && node.scrollHeight > node.clientHeight + 2)
      fault('text cut', node, `${node.scrollHeight} px in a height of ${node.clientHeight}`);
  }
  for (const svg of document.querySelectorAll('svg')) {
    if (!shown(svg)) continue;
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].filter(shown).map(node => [node, node.getBoundingClientRect()]);
    texts.forEach(([node, box], at) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 2)
        fault('text cut', node, `${Math.round(box.left - frame.left)} to ${Math.round(box.right - frame.left)} px ` +
          `in a picture of ${Math.round(frame.width)}`);
      for (const [other, next] of texts.slice(at + 1))
        if (box.right > next.left + 1 && next.right > box.left + 1 && box.bottom > next.top + 4 && next.bottom > box.top + 4)
          fault('texts overlap', node, `and "${words(other)}"`);
    });
  }

  // ---- contrast: WCAG 2, AA
  // The ground of a text in a picture is the last shape before it that covers its middle.
  const groundOf = node => {
    const svg = node.closest('svg');
    if (!svg) return ground(node);
    const box = node.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
    const under = [...svg.querySelectorAll('rect, circle')].filter(shape => {
      const part = shape.getBoundingClientRect();
      return shape.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING && shown(shape) &&
        part.left <= x && x <= part.right && part.top <= y && y <= part.bottom;
    });
    return under.reduce((color, shape) => over(rgba(styleOf(shape).fill), color), ground(svg));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), done = new Set(), range = new Range();
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (done.has(node) || !walker.currentNode.data.trim() || !shown(node)) continue;
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) continue;
    done.add(node);
    const style = styleOf(node), size = parseFloat(style.fontSize), under = groundOf(node);
    const opacity = [...ancestors(node)].reduce((part, each) => part * styleOf(each).opacity, 1);
    const ink = over(rgba(node.closest('svg') ? style.fill : style.color), under, opacity);
    const found = contrast(ink, under), least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (found < least)
      fault('contrast', node, `${found.toFixed(2)} of ${least}: rgb(${ink.map(Math.round)}) on rgb(${under.map(Math.round)})`);
  }

  // ---- pictures
  for (const image of document.images) {
    if (!shown(image)) continue;
    if (!image.naturalWidth) { fault('picture missing', image, image.src); continue; }
    if (!dark) continue;
    const drawn = new OffscreenCanvas(32, 32).getContext('2d', { willReadFrequently: true });  // with the filter that turns it dark
    drawn.fillStyle = `rgb(${page})`; drawn.fillRect(0, 0, 32, 32);
    drawn.filter = styleOf(image).filter; drawn.drawImage(image, 0, 0, 32, 32);
    const corners = [[0, 0], [31, 0], [0, 31], [31, 31]].map(([x, y]) => luminance([...drawn.getImageData(x, y, 1, 1).data].slice(0, 3)));
    if (Math.min(...corners) > 0.4) fault('white box in the dark', image, `luminance ${Math.min(...corners).toFixed(2)}`);
  }

  return JSON.stringify({
    faults, boxes, height: root.scrollHeight,
    links: [...document.querySelectorAll('a[href]')].map(node => node.href),
    ids: [...document.querySelectorAll('[id], a[name]')].map(node => node.id || node.name),
  });
})()
