"""The script and style of an explanation's page: plain JavaScript, all text set as text."""

PAGE_STYLE = """
.lens .words{display:flex;flex-wrap:wrap;gap:.3rem;margin:.25rem 0 1rem}
.lens .word{border:1px solid var(--line);border-radius:5px;padding:.1rem .45rem;font:inherit;
background:transparent;color:var(--ink);min-height:1.9rem;white-space:pre-wrap;
max-width:100%;overflow-wrap:anywhere;text-align:start}
.lens button.word{cursor:pointer}
.lens button.word[aria-pressed=true]{border-color:var(--c0);box-shadow:inset 0 0 0 1px var(--c0)}
.lens button.word.near{border-style:dashed;border-color:var(--c0)}
.lens span.word{cursor:default}
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
.lens .map rect.weight{fill:var(--plus)}.lens .map rect.on{stroke:var(--c1);stroke-width:1.5}
.lens .map text{font-size:11px;fill:var(--ink)}
.lens .pictures{display:flex;flex-wrap:wrap;gap:.5rem 1.25rem;margin:.25rem 0 .5rem}
.lens .pictures figure{margin:0;width:13.5rem;max-width:100%}
.lens .pictures figcaption{margin-top:.3rem;font-size:.85rem}
.lens .frame{position:relative;background:#808080;border-radius:4px;overflow:hidden}
.lens .frame img{display:block;width:100%;height:100%;image-rendering:pixelated}
.lens .frame.over img{opacity:.5;filter:grayscale(1)}
.lens .cells{position:absolute;inset:0;display:grid}
.lens .cells span{min-width:0;min-height:0;outline-offset:-1px}
.lens .cells span:hover,.lens .cells span.on{outline:1.5px solid #fff;box-shadow:0 0 0 1px #000}
@media (max-width:520px){.lens .bars{grid-template-columns:minmax(4rem,46%) 1fr 3rem;
font-size:.8rem}.lens .pictures figure{width:calc(50% - .7rem)}}
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
  const shown = (v) => (Math.abs(v) < 0.005 ? "" : v < 0 ? "−" : "+") + Math.abs(v).toFixed(2);
  const percent = (p) => (p < 0.1 && p > 0 ? (100 * p).toFixed(1) : (100 * p).toFixed(0)) + " %";
  const shade = (v, most) =>
    "color-mix(in srgb, var(" + (v < 0 ? "--minus" : "--plus") + ") " +
    Math.round(Math.min(1, Math.abs(v) / (most || 1)) * 62) + "%, transparent)";
  root.classList.add("lens");

  // ── Pictures of an image, with one cell for each patch ──
  const grid = data.image;
  const tint = (v, most) => "rgba(" + (v < 0 ? "255,122,26," : "47,155,255,") +
    (0.85 * Math.min(1, Math.abs(v) / (most || 1))).toFixed(3) + ")";
  function frame(parent, over, caption) {
    const figure = make("figure", "", undefined, parent);
    const box = make("div", over ? "frame over" : "frame", undefined, figure);
    box.style.aspectRatio = grid.width + " / " + grid.height;
    const image = make("img", "", undefined, box);
    image.src = grid.uri;
    image.alt = "the image";
    const below = make("figcaption", "", caption, figure);
    const cells = make("div", "cells", undefined, box);
    cells.style.gridTemplate = "repeat(" + grid.rows + ",1fr) / repeat(" + grid.columns + ",1fr)";
    const each = [];
    for (let n = 0; n < grid.rows * grid.columns; n++)
      each.push(make("span", "", undefined, cells));
    return {cells: each, below};
  }

  // ── One output ──
  const words = data.outputs.length > 1;
  make("h3", "", words ? "Output: choose a word" : "Output", root);
  const outputs = make("div", "words", undefined, root);
  const marks = {};  // of each side, the element of each token
  const names = {encoder: "Input", decoder: "Input so far", columns: "Columns"};
  const tellOn = (e, side, i) => {
    for (const kind of ["pointerenter", "focus", "click"])
      e.addEventListener(kind, () => { describe(side, i); });
  };
  let attended = null;
  for (const side in data.tokens) {
    const label = Object.keys(data.tokens).length > 1
      ? (side === "encoder" ? "Source" : "Target so far") : names[side] || "Input";
    make("h3", "", label + ": shaded by " + (side === "columns" ? "their" : "its") +
      " contribution to the " + data.kind, root);
    const place = make("div", "words", undefined, root);
    marks[side] = data.tokens[side].slice(0, grid ? grid.first : undefined).map((token, i) => {
      const e = make("span", "word", token, place);
      e.tabIndex = 0;
      tellOn(e, side, i);
      return e;
    });
    if (!grid) continue;
    if (!grid.first) place.remove();
    const pictures = make("div", "pictures", undefined, root);
    frame(pictures, false, "as it was read").cells.forEach(
      (e, n) => { tellOn(e, side, n + grid.first); });
    const shaded = frame(pictures, true, "blue adds to the " + data.kind + ", orange subtracts");
    shaded.cells.forEach((e, n) => { marks[side].push(e); tellOn(e, side, n + grid.first); });
    if (data.maps.length) {
      attended = frame(pictures, true, "");
      attended.cells.forEach((e, n) => { tellOn(e, side, n + grid.first); });
    }
  }
  const status = make("p", "status", "", root);
  const bars = document.createElement("div");
  if (data.pieces[0].length > 1) {
    make("h3", "", "The " + data.kind + ", taken apart", root);
    bars.className = "bars";
    root.append(bars);
  }
  const layers = document.createElement("table");
  if (data.layers.names.length) {
    make("h3", "", "What the model would have said after each layer", root);
    make("div", "wide", undefined, root).append(layers);
  }

  let chosen = 0, fixed = 0;
  const place = document.createElement("select"), head = document.createElement("select");
  // Weight of the chosen output's row on an input, in the layer and head shown below; of one output
  // for the whole input, the mean over all rows.
  function attention(side, i) {
    if (!data.maps.length) return "";
    const n = Number(place.value), h = Number(head.value), m = data.maps[n];
    const memory = m.name.endsWith(".memory");
    if ((memory ? "encoder" : m.name.split(".")[0]) !== side) return "";
    const of = " of its attention (" + head.selectedOptions[0].textContent + ")";
    if (data.pooled)
      return "; in " + m.name + " a position gives it " + percent(received(n, h, i)) +
        " on average (" + head.selectedOptions[0].textContent + ")";
    const q = data.first + chosen - m.start;
    if (q < 0 || q >= m.rows.length) return "";
    return "; " + m.name + " gives it " + percent(weight(n, h, q, i)) + of;
  }
  function received(n, h, i) {
    const rows = data.maps[n].rows.length;
    let total = 0;
    for (let q = 0; q < rows; q++) total += weight(n, h, q, i);
    return total / rows;
  }
  function describe(side, i) {
    const v = data.contributions[side][chosen][i];
    status.textContent = "“" + data.tokens[side][i] + "” adds " + shown(v) + " to the " +
      data.kind + " of “" + data.outputs[chosen] + "”" + attention(side, i) + ".";
    look(i);
  }
  // Where the pointed patch (by default all, their mean) attends, over the image.
  function look(q) {
    if (!attended) return;
    const n = Number(place.value), h = Number(head.value), m = data.maps[n];
    const values = attended.cells.map((_, k) => q === undefined
      ? received(n, h, k + grid.first) : weight(n, h, q, k + grid.first));
    const most = Math.max(...values);
    attended.cells.forEach((e, k) => {
      e.style.background = tint(values[k], most);
      e.classList.toggle("on", k + grid.first === q);
    });
    attended.below.textContent = "attention of " + (q === undefined ? "all positions, mean"
      : data.tokens.encoder[q]) + ", " + m.name + ", " + head.selectedOptions[0].textContent;
  }
  const buttons = data.outputs.map((text, p) => {
    const b = make("button", "word", text, outputs);
    b.type = "button";
    if (data.probabilities[p] !== null) b.title = percent(data.probabilities[p]);
    b.addEventListener("click", () => { chosen = fixed = p; show(); });
    b.addEventListener("pointerenter", (e) => {
      if (e.pointerType === "mouse") { chosen = p; show(); }
    });
    return b;
  });
  outputs.addEventListener("pointerleave", () => { chosen = fixed; show(); });
  function show() {
    buttons.forEach((b, p) => b.setAttribute("aria-pressed", String(p === fixed)));
    buttons.forEach((b, p) => b.classList.toggle("near", p === chosen && p !== fixed));
    let most = 0;
    for (const side in data.contributions)
      data.contributions[side][chosen].forEach((v) => { most = Math.max(most, Math.abs(v)); });
    for (const side in data.contributions)
      marks[side].forEach((e, i) => {
        const v = data.contributions[side][chosen][i];
        e.style.background = grid && i >= grid.first ? tint(v, most) : shade(v, most);
      });
    const p = data.probabilities[chosen];
    status.textContent = p === null ? "" : "“" + data.outputs[chosen] + "” has probability " +
      percent(p) + ".";
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
  if (!data.maps.length) { show(); return; }
  make("h3", "", "Attention: choose a layer and a head", root);
  const choose = make("div", "choose", undefined, root);
  choose.append(place, head);
  place.setAttribute("aria-label", "layer");
  data.maps.forEach((m, n) => { make("option", "", m.name, place).value = n; });
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
  // What the key adds to the output at the query's position, if that output is explained.
  function effect(m, q, k) {
    const side = m.name.endsWith(".memory") ? "encoder" : m.name.split(".")[0];
    const p = data.pooled ? chosen : m.start + q - data.first;
    const table = data.contributions[side];
    if (!table || p < 0 || p >= data.outputs.length) return "";
    if (!m.name.endsWith(".memory") && Object.keys(data.tokens).length > 1 && side === "encoder")
      return "";
    return "; in all, “" + m.columns[k] + "” adds " + shown(table[p][k]) + " to the " +
      data.kind + " of “" + data.outputs[p] + "”";
  }
  function paint() {
    const n = Number(place.value), h = Number(head.value), m = data.maps[n];
    look();
    if (grid && m.columns.length > 100) {
      tip.textContent = "Point at a patch of the image above for its attention.";
      return;
    }
    const size = m.columns.length > 40 ? 12 : 20;
    const cut = (t) => (t.length > 14 ? t.slice(0, 13) + "…" : t);
    const left = 8 + 7 * Math.max(...m.rows.map((t) => cut(t).length));
    const top = 12 + 6 * Math.max(...m.columns.map((t) => cut(t).length));
    picture.replaceChildren();
    let most = 1e-9;  // shades are relative to the largest weight: a diffuse map is seen, too
    m.rows.forEach((_, q) => m.columns.forEach((_, k) => {
      most = Math.max(most, weight(n, h, q, k));
    }));
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
          class: "weight", x: left + size * k, y: top + size * q, width: size - 1,
          height: size - 1, "fill-opacity": (0.04 + 0.96 * weight(n, h, q, k) / most).toFixed(3),
          "data-q": q, "data-k": k,
        }, svg);
      });
    });
    tip.textContent = "Rows are queries, columns keys, the strongest cell is " + percent(most) +
      "; point at a cell.";
    let last = null;
    const point = (event) => {
      const e = event.target;
      if (!e.dataset || e.dataset.q === undefined || e === last) return;
      if (last) last.classList.remove("on");
      last = e;
      e.classList.add("on");
      const q = Number(e.dataset.q), k = Number(e.dataset.k);
      tip.textContent = "“" + m.rows[q] + "” gives “" + m.columns[k] + "” " +
        (100 * weight(n, h, q, k)).toFixed(1) + " % of its attention" + effect(m, q, k) + ".";
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
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
