"""The script and style of an explanation's page: plain JavaScript, all text set as text."""

PAGE_STYLE = """
.lens .words{display:flex;flex-wrap:wrap;gap:.3rem;margin:.25rem 0 1rem}
.lens .word{border:1px solid var(--line);border-radius:5px;padding:.1rem .45rem;font:inherit;
background:transparent;color:var(--ink);min-height:1.9rem;white-space:pre}
.lens button.word{cursor:pointer}
.lens button.word[aria-pressed=true]{border-color:var(--c0);box-shadow:inset 0 0 0 1px var(--c0)}
.lens h3{font-size:.95rem;margin:1.25rem 0 .35rem;color:var(--soft);font-weight:600}
.lens .bars{display:grid;grid-template-columns:minmax(7rem,auto) 1fr 4.5rem;gap:.15rem .6rem;
font-size:.85rem;align-items:center;font-variant-numeric:tabular-nums}
.lens .bars .track{position:relative;height:.8rem;background:var(--faint);border-radius:2px}
.lens .bars .fill{position:absolute;top:0;bottom:0;border-radius:2px}
.lens .bars .amount{text-align:right}.lens .bars .piece{overflow-wrap:anywhere}
.lens .choose{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:center;margin:.5rem 0}
.lens select,.lens .choose button{font:inherit;font-size:.9rem;color:var(--ink);
background:var(--raised);border:1px solid var(--line);border-radius:5px;padding:.25rem .5rem}
.lens .status{min-height:1.5rem;font-size:.9rem;color:var(--soft);
font-variant-numeric:tabular-nums;margin:.25rem 0}
.lens .map{overflow-x:auto}
.lens .map svg{max-width:none;touch-action:pan-x pan-y}
.lens .map rect.cell{fill:var(--plus)}.lens .map rect.on{stroke:var(--c1);stroke-width:1.5}
.lens .map text{font-size:11px;fill:var(--ink)}
.lens table td{white-space:nowrap;padding-left:.4rem}.lens .dim{color:var(--soft)}
"""

PAGE_SCRIPT = r"""
function (root, data) {
  const make = (tag, kind, text, parent) => {
    const e = document.createElement(tag);
    if (kind) e.className = kind;
    if (text !== undefined) e.textContent = text;
    if (parent) parent.append(e);
    return e;
  };
  const draw = (tag, attributes, parent) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) e.setAttribute(name, attributes[name]);
    parent.append(e);
    return e;
  };
  const shown = (v) => (v < 0 ? "−" : "+") + Math.abs(v).toFixed(2);
  const percent = (p) => (p < 0.1 && p > 0 ? (100 * p).toFixed(1) : (100 * p).toFixed(0)) + " %";
  const shade = (v, most) =>
    "color-mix(in srgb, var(" + (v < 0 ? "--minus" : "--plus") + ") " +
    Math.round(Math.min(1, Math.abs(v) / (most || 1)) * 62) + "%, transparent)";
  root.classList.add("lens");

  // ── One output ──
  make("h3", "", "Output: choose a word", root);
  const outputs = make("div", "words", undefined, root);
  const sides = {};
  const names = {encoder: "Input", decoder: "Input so far"};
  for (const side in data.tokens) {
    const label = Object.keys(data.tokens).length > 1
      ? (side === "encoder" ? "Source" : "Target so far") : names[side] || "Input";
    make("h3", "", label + ": shaded by its contribution to the logit", root);
    sides[side] = make("div", "words", undefined, root);
    data.tokens[side].forEach((token) => make("span", "word", token, sides[side]));
  }
  const status = make("p", "status", "", root);
  make("h3", "", "The logit, taken apart", root);
  const bars = make("div", "bars", undefined, root);
  make("h3", "", "What the model would have said after each layer", root);
  const layers = make("table", "", undefined, make("div", "wide", undefined, root));

  let chosen = 0;
  const buttons = data.outputs.map((text, p) => {
    const b = make("button", "word", text, outputs);
    b.type = "button";
    b.title = percent(data.probabilities[p]);
    b.addEventListener("click", () => { chosen = p; show(); });
    return b;
  });
  function show() {
    buttons.forEach((b, p) => b.setAttribute("aria-pressed", String(p === chosen)));
    let most = 0;
    for (const side in data.contributions)
      data.contributions[side][chosen].forEach((v) => { most = Math.max(most, Math.abs(v)); });
    for (const side in data.contributions)
      [...sides[side].children].forEach((e, i) => {
        const v = data.contributions[side][chosen][i];
        e.style.background = shade(v, most);
        e.title = shown(v) + " logits";
      });
    status.textContent = "“" + data.outputs[chosen] + "” has probability " +
      percent(data.probabilities[chosen]) + ".";
    bars.replaceChildren();
    const pieces = data.pieces[chosen];
    const top = Math.max(...pieces.map((p) => Math.abs(p[1])), 1e-9);
    pieces.forEach(([name, v]) => {
      make("span", "piece", name, bars);
      const fill = make("span", "fill", undefined, make("span", "track", undefined, bars));
      fill.style.background = "var(" + (v < 0 ? "--minus" : "--plus") + ")";
      const width = 50 * Math.abs(v) / top;
      fill.style.width = width + "%";
      fill.style.left = (v < 0 ? 50 - width : 50) + "%";
      make("span", "amount", shown(v), bars);
    });
    layers.replaceChildren();
    data.layers.names.forEach((name, n) => {
      const row = make("tr", "", undefined, layers);
      make("td", "dim", name, row);
      data.layers.cells[n][chosen].forEach(([text, p]) => {
        const cell = make("td", "", text + " ", row);
        make("span", "dim", percent(p), cell);
        cell.style.background = shade(p, 1.6);
      });
    });
  }

  // ── Maps ──
  make("h3", "", "Attention: choose a layer and a head", root);
  const choose = make("div", "choose", undefined, root);
  const place = make("select", "", undefined, choose);
  place.setAttribute("aria-label", "layer");
  data.maps.forEach((m, n) => { make("option", "", m.name, place).value = n; });
  const head = make("select", "", undefined, choose);
  head.setAttribute("aria-label", "head");
  const tip = make("p", "status", "", root);
  const picture = make("div", "map", undefined, root);
  const bytes = data.maps.map((m) => Uint8Array.from(atob(m.data), (c) => c.charCodeAt(0)));
  function heads() {
    head.replaceChildren();
    const count = data.maps[place.value].heads;
    if (count > 1) make("option", "", "mean of heads", head).value = -1;
    for (let h = 0; h < count; h++)
      make("option", "", count > 1 ? "head " + h : "mean of heads", head).value = h;
  }
  function weight(n, h, q, k) {
    const m = data.maps[n], area = m.rows.length * m.columns.length;
    const at = q * m.columns.length + k;
    if (h >= 0) return bytes[n][h * area + at] / 255;
    let total = 0;
    for (let i = 0; i < m.heads; i++) total += bytes[n][i * area + at];
    return total / m.heads / 255;
  }
  function paint() {
    const n = Number(place.value), h = Number(head.value), m = data.maps[n];
    const size = m.columns.length > 40 ? 12 : 20;
    const cut = (t) => (t.length > 14 ? t.slice(0, 13) + "…" : t);
    const left = 8 + 7 * Math.max(...m.rows.map((t) => cut(t).length));
    const top = 12 + 6 * Math.max(...m.columns.map((t) => cut(t).length));
    picture.replaceChildren();
    const width = left + size * m.columns.length + 60, height = top + size * m.rows.length + 4;
    const svg = draw("svg", {width, height, role: "img", "aria-label": m.name}, picture);
    m.columns.forEach((t, k) => {
      const x = left + size * (k + 0.6);
      draw("text", {x, y: top - 6, transform: `rotate(-50 ${x} ${top - 6})`}, svg)
        .textContent = cut(t);
    });
    m.rows.forEach((t, q) => {
      const y = top + size * (q + 0.5) + 4;
      draw("text", {x: left - 6, y, "text-anchor": "end"}, svg).textContent = cut(t);
      m.columns.forEach((_, k) => {
        draw("rect", {
          class: "cell", x: left + size * k, y: top + size * q, width: size - 1,
          height: size - 1, "fill-opacity": (0.04 + 0.96 * weight(n, h, q, k)).toFixed(3),
          "data-q": q, "data-k": k,
        }, svg);
      });
    });
    tip.textContent = "Rows are queries, columns keys; point at a cell.";
    let last = null;
    svg.addEventListener("pointermove", (event) => {
      const e = event.target;
      if (!e.dataset || e.dataset.q === undefined || e === last) return;
      if (last) last.classList.remove("on");
      last = e;
      e.classList.add("on");
      const q = Number(e.dataset.q), k = Number(e.dataset.k);
      tip.textContent = "“" + m.rows[q] + "” gives “" + m.columns[k] + "” " +
        (100 * weight(n, h, q, k)).toFixed(1) + " % of its attention.";
    });
  }
  place.value = data.maps.length - 1;
  place.addEventListener("change", () => { const h = head.value; heads();
    if ([...head.options].some((o) => o.value === h)) head.value = h; paint(); });
  head.addEventListener("change", paint);
  heads();
  show();
  paint();
}
"""
