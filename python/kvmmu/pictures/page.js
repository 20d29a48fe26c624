// What the page does: draws the maps on canvases, hands the series to the plotting library, and
// keeps the views on one time. All data is in the element #data; maps are zlib, as base64.
"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const root = document.documentElement;
const NAMES = data.codes.map((name) => name.replace("_", " "));
NAMES[data.codes.indexOf("held")] = "kept to grow into";
NAMES[data.codes.indexOf("fenced")] = "fenced: a step may still touch it";
NAMES[data.codes.indexOf("destined")] = "destined: a move fills it";
const EMPTY = data.codes.indexOf("empty"), NULL = data.codes.indexOf("null");
const IN_USE = data.codes.indexOf("in_use"), WINDOW = 512;
const number = new Intl.NumberFormat("en-US");
const short = (value) => {
  if (value === null) return "none";
  const digits = Math.abs(value) >= 100 ? 0 : 3;
  return digits ? String(Number(value.toPrecision(digits))) : number.format(Math.round(value));
};

// -- colours ------------------------------------------------------------------------------------

const named = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const mix = (a, b, share) => a.map((value, i) => Math.round(value * share + b[i] * (1 - share)));
const css = (colour) => `rgb(${colour.join(",")})`;
const dark = () => root.dataset.theme === "dark";

function hsl(hue, saturation, light) {
  const a = saturation * Math.min(light, 1 - light);
  const at = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [at(0), at(8), at(4)];
}

function sequenceColour(index) {
  if (index === 0) return rgb(named("unmapped"));
  const light = (dark() ? 0.5 : 0.42) + (index % 3) * 0.13;
  return hsl((index * 137.5) % 360, 0.6, light);
}

function pageColour(index) {  // 1 + order
  if (index === 0) return rgb(named("unmapped"));
  const order = index - 1;
  const stop = order === 0 ? 0 : order < 5 ? 1 : order < 9 ? 2 : 3;
  return rgb((dark() ? ["#f2b134", "#4cc2b3", "#7aaee6", "#8f5fd0"]
    : ["#e9a820", "#2a9d8f", "#3a6fb0", "#4c1d78"])[stop]);
}

/** Colours of all 256 bytes of a plane; `shaded` bytes have a share in their high half. */
function palette(plane, shaded) {
  const colours = [];
  const empty = rgb(named("empty"));
  for (let byte = 0; byte < 256; byte++) {
    if (plane === 0) {
      const code = byte & 15, share = shaded ? (byte >> 4) / 15 : 1;
      const full = rgb(named(data.codes[code] || "ink"));
      colours.push(code === EMPTY ? mix(rgb(named("in_use")), full, 0.5 * (1 - share))
        : mix(full, empty, 0.3 + 0.7 * share));
    } else {
      colours.push(plane === 1 ? sequenceColour(byte) : pageColour(Math.min(byte, 10)));
    }
  }
  return colours;
}

const LINES = ["#0072b2", "#d55e00", "#009e73", "#b0579b", "#b8860b", "#3f9fd8", "#7a7a7a",
  "#8c4b2f", "#5a5ad6", "#2f8f8f"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const lineColour = (i) => {
  const colour = rgb(LINES[i % LINES.length]);
  return css(dark() ? mix(colour, [255, 255, 255], 0.68) : colour);
};

// -- time ---------------------------------------------------------------------------------------

const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
  3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function clock(seconds) {
  if (seconds < 60) return `${Number(seconds.toFixed(2))} s`;
  const whole = Math.round(seconds), h = Math.floor(whole / 3600);
  const m = Math.floor(whole / 60) % 60, s = whole % 60;
  if (h) return `${h} h` + (m ? ` ${m}` : "") + (s ? `:${String(s).padStart(2, "0")}` : "");
  return `${m} min` + (s ? ` ${s}` : "");
}

function timeTicks(from, to, most) {
  const step = STEPS.find((step) => (to - from) / step <= most) || STEPS[STEPS.length - 1];
  const ticks = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function blockTicks(blocks) {
  const rough = blocks / 5, power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const step = Math.max(1, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough));
  return Array.from({ length: Math.floor(blocks / step) + 1 }, (_, i) => i * step);
}

// -- data ---------------------------------------------------------------------------------------

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const MARGIN = { left: 66, right: 16, top: 14, bottom: 26 };
const PASS_TOP = 8;
const view = { run: 0, plane: 0, range: null, column: 0, cell: 0, pass: 0, after: false };
let plots = [];

const run = () => data.runs[view.run];
const end = (times) => {
  const n = times.length;
  return n < 2 ? times[0] + 1 : times[n - 1] + (times[n - 1] - times[0]) / (n - 1);
};
const whole = () => [Math.min(...data.runs.map((r) => r.times[0])),
  Math.max(...data.runs.map((r) => end(r.times)))];
const range = () => view.range || whole();

/** A canvas of the width that it has, in the pixels of the device. */
function prepared(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.imageSmoothingEnabled = false;
  return [context, width];
}

/** An image of rows of bytes. */
function painted(bytes, width, height, colours) {
  const image = new ImageData(width, height), out = image.data;
  for (let at = 0; at < width * height; at++) {
    const colour = bytes[at] === undefined ? colours[EMPTY] : colours[bytes[at]];
    out.set(colour, 4 * at);
    out[4 * at + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// -- the map over time --------------------------------------------------------------------------

const mapHeight = (cells) => cells * Math.max(1, Math.ceil(240 / cells));

function mapGeometry() {
  const { cells } = run(), [from, to] = range();
  const width = $("map").clientWidth - MARGIN.left - MARGIN.right, height = mapHeight(cells);
  return { from, to, width, height, x: (t) => MARGIN.left + (t - from) / (to - from) * width };
}

function drawMap() {
  const current = run(), { times, cells, blocks, cellBlocks } = current, columns = times.length;
  const { from, to, width, height, x } = mapGeometry();
  const [context] = prepared($("map"), height + MARGIN.top + MARGIN.bottom);
  const plane = current.bytes.subarray(view.plane * cells * columns, (view.plane + 1) * cells * columns);
  // Row r of the plane is cell r; the picture has block 0 at the bottom.
  const flipped = new Uint8Array(plane.length);
  for (let cell = 0; cell < cells; cell++)
    flipped.set(plane.subarray(cell * columns, (cell + 1) * columns), (cells - 1 - cell) * columns);
  const image = painted(flipped, columns, cells, palette(view.plane, true));
  context.fillStyle = named("panel");
  context.fillRect(MARGIN.left, MARGIN.top, width, height);
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, MARGIN.top, width, height);
  context.clip();
  for (let i = 0; i < columns; i++) {
    const left = Math.round(x(times[i]));
    const right = Math.round(x(i + 1 < columns ? times[i + 1] : end(times)));
    if (right > left && right > MARGIN.left && left < MARGIN.left + width)
      context.drawImage(image, i, 0, 1, cells, left, MARGIN.top, right - left, height);
  }
  context.restore();
  context.fillStyle = named("soft");
  context.strokeStyle = named("soft");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const yOf = (block) => MARGIN.top + height - (block / cellBlocks) / cells * height;
  for (const block of blockTicks(blocks)) {
    const y = yOf(block);
    context.fillRect(MARGIN.left - 4, y - 0.5, 4, 1);
    context.fillText(number.format(block), MARGIN.left - 7, y);
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of timeTicks(from, to, Math.max(2, width / 70))) {
    const at = Math.round(x(tick)), text = clock(tick), half = context.measureText(text).width / 2;
    context.fillRect(at, MARGIN.top + height, 1, 4);
    context.fillText(text, Math.min(at, MARGIN.left + width + MARGIN.right - half),
      MARGIN.top + height + 8);
  }
  context.fillStyle = named("moved");
  current.compactions.forEach((pass, index) => {
    const at = x(pass.time);
    if (pass.time < from || pass.time > to) return;
    const size = index === view.pass ? 7 : 5;
    context.beginPath();
    context.moveTo(at - size, MARGIN.top - 2 - size);
    context.lineTo(at + size, MARGIN.top - 2 - size);
    context.lineTo(at, MARGIN.top - 2);
    context.fill();
  });
  const column = Math.min(view.column, columns - 1);
  const at = Math.round(x(times[column]));
  if (at >= MARGIN.left && at <= MARGIN.left + width) {
    context.fillStyle = named("ink");
    context.fillRect(at, MARGIN.top, 1, height);
    context.fillRect(MARGIN.left - 6, yOf(view.cell * cellBlocks + cellBlocks / 2) - 1, 6, 2);
  }
  $("map").setAttribute("aria-label", `Memory of ${current.policy} over time: ${number.format(blocks)} `
    + `blocks, ${columns} moments from ${clock(times[0])} to ${clock(times[columns - 1])}, coloured by `
    + ["state", "sequence", "page size"][view.plane]);
  readout();
}

function readout() {
  const { times, cells, blocks, cellBlocks, bytes } = run(), columns = times.length;
  const column = Math.min(view.column, columns - 1), cell = Math.min(view.cell, cells - 1);
  const byte = (plane) => bytes[(plane * cells + cell) * columns + column];
  const last = Math.min((cell + 1) * cellBlocks, blocks) - 1;
  const order = byte(2), share = Math.round((byte(0) >> 4) / 15 * 100);
  const pages = order === 0 ? "" : `, mapped by pages of ${number.format(2 ** (order - 1))}`;
  const where = cell * cellBlocks === last ? `block ${number.format(last)}`
    : `blocks ${number.format(cell * cellBlocks)} to ${number.format(last)}`;
  $("readout").textContent = `${clock(times[column])}, ${where}: `
    + `${share} % ${NAMES[byte(0) & 15]}${pages}`;
}

function legend() {
  const items = [];
  if (view.plane === 0) {
    const seen = new Set();
    for (const r of data.runs)
      for (const byte of r.bytes.subarray(0, r.cells * r.times.length)) seen.add(byte & 15);
    for (const r of data.runs) for (const pass of r.compactions)
      for (const map of pass.maps || []) for (const byte of map.subarray(0, r.blocks)) seen.add(byte);
    seen.delete(NULL);
    [...seen].sort((a, b) => a - b).forEach((c) => items.push([rgb(named(data.codes[c])), NAMES[c]]));
  } else if (view.plane === 1) {
    items.push([sequenceColour(0), "no sequence"]);
    items.push([sequenceColour(1), `sequences, in ${data.colours} colours that come again`]);
  } else {
    const seen = new Set();
    for (const r of data.runs)
      for (const byte of r.bytes.subarray(2 * r.cells * r.times.length)) seen.add(byte);
    [...seen].sort((a, b) => a - b).forEach((o) => items.push([pageColour(o),
      o === 0 ? "not mapped" : o === 1 ? "single blocks" : `pages of ${number.format(2 ** (o - 1))}`]));
  }
  $("legend").replaceChildren(...items.map(([colour, text]) => {
    const item = document.createElement("li"), swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = css(colour);
    item.append(swatch, text);
    return item;
  }));
}

function moveCursor(column, cell) {
  const { times, cells } = run();
  view.column = Math.max(0, Math.min(times.length - 1, column));
  view.cell = Math.max(0, Math.min(cells - 1, cell));
  drawMap();
}

function placeIn(event) {
  const { from, to, width, height } = mapGeometry(), box = $("map").getBoundingClientRect();
  const time = from + (event.clientX - box.left - MARGIN.left) / width * (to - from);
  const { times, cells } = run();
  let column = times.findIndex((t) => t > time);
  column = (column < 0 ? times.length : column) - 1;
  const down = (event.clientY - box.top - MARGIN.top) / height;
  return { column, cell: Math.floor((1 - down) * cells), time, down };
}

function listenToMap() {
  $("map").addEventListener("pointermove", (event) => {
    const { column, cell } = placeIn(event);
    moveCursor(column, cell);
  });
  $("map").addEventListener("click", (event) => {
    const { compactions } = run(), { time } = placeIn(event), { from, to, width } = mapGeometry();
    const near = compactions.map((pass, i) => [Math.abs(pass.time - time), i]).sort((a, b) => a[0] - b[0]);
    if (near.length && near[0][0] / (to - from) * width < 12) choosePass(near[0][1]);
  });
  $("map").addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const steps = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, far], ArrowDown: [0, -far],
      Home: [-1e9, 0], End: [1e9, 0] }[event.key];
    if (!steps) return;
    event.preventDefault();
    moveCursor(view.column + steps[0], view.cell + steps[1]);
  });
}

// -- before and after ---------------------------------------------------------------------------

async function mapsOf(pass) {
  if (!pass.maps) pass.maps = await Promise.all([inflate(pass.before), inflate(pass.after)]);
  return pass.maps;
}

function listPasses() {
  const { compactions } = run();
  $("passes").hidden = compactions.length === 0;
  $("pass-list").replaceChildren(...compactions.map((pass, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${clock(pass.time)}: ${number.format(pass.moves.length)} moves`;
    button.addEventListener("click", () => choosePass(i));
    return button;
  }));
}

async function choosePass(index) {
  view.pass = index;
  await drawPass();
  drawMap();
}

let passRows = [];

async function drawPass() {
  const current = run(), pass = current.compactions[view.pass];
  if (!pass) return;
  const maps = await mapsOf(pass), bytes = maps[view.after ? 1 : 0], { blocks } = current;
  [...$("pass-list").children].forEach((button, i) => {
    if (i === view.pass) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  });
  const windows = Math.ceil(blocks / WINDOW);
  const touched = new Set(pass.moves.flat().map((block) => Math.floor(block / WINDOW)));
  const all = $("all-windows").checked;
  passRows = [...Array(windows).keys()].filter((w) => all || touched.has(w));
  const rowHeight = all ? Math.max(2, Math.min(12, Math.floor(420 / windows)))
    : Math.max(6, Math.min(20, Math.floor(420 / passRows.length)));
  const gap = rowHeight >= 6 ? 2 : 0, height = passRows.length * (rowHeight + gap);
  const [context, width] = prepared($("pass"), height + 2 * PASS_TOP);
  const plane = bytes.subarray(view.plane * blocks, (view.plane + 1) * blocks);
  const shown = new Uint8Array(passRows.length * WINDOW);
  passRows.forEach((w, row) => shown.set(plane.subarray(w * WINDOW, (w + 1) * WINDOW), row * WINDOW));
  const image = painted(shown, WINDOW, passRows.length, palette(view.plane, false));
  const across = width - MARGIN.left - MARGIN.right;
  const moved = new Map();
  pass.moves.forEach(([from, to]) => moved.set(view.after ? to : from, view.after ? from : to));
  context.textAlign = "right";
  context.textBaseline = "middle";
  let labelled = -100;
  passRows.forEach((w, row) => {
    const y = row * (rowHeight + gap) + PASS_TOP, present = Math.min(WINDOW, blocks - w * WINDOW);
    context.drawImage(image, 0, row, present, 1, MARGIN.left, y, across * present / WINDOW, rowHeight);
    if (y - labelled >= 15) {
      context.fillStyle = named("soft");
      context.fillText(number.format(w * WINDOW), MARGIN.left - 7, y + rowHeight / 2);
      labelled = y;
    }
  });
  const mark = Math.max(1, Math.min(4, rowHeight / 3)), thick = Math.max(across / WINDOW, 1.5);
  const rowOf = new Map(passRows.map((w, row) => [w, row]));
  context.fillStyle = named("moved");
  for (const block of moved.keys()) {
    const row = rowOf.get(Math.floor(block / WINDOW));
    const y = row * (rowHeight + gap) + PASS_TOP + rowHeight - mark;
    context.fillRect(MARGIN.left + (block % WINDOW) / WINDOW * across, y, thick, mark);
  }
  pass.shown = { plane: bytes, moved, rowHeight, gap, across };
  const effects = Object.entries(pass.effect)
    .map(([name, [a, b]]) => `${name} ${number.format(a)} before, ${number.format(b)} after`).join("; ");
  const text = `${view.after ? "After" : "Before"} the pass at ${clock(pass.time)}: `
    + `${number.format(pass.moves.length)} blocks moved, ${number.format(touched.size)} of `
    + `${number.format(windows)} windows touched; ${effects}. Marked: where blocks `
    + (view.after ? "were moved to." : "are moved from.");
  $("pass-text").textContent = text;
  $("pass").setAttribute("aria-label", `Memory of ${current.policy}, by window. ${text}`);
  $("flip").textContent = view.after ? "Show before" : "Show after";
  $("flip").setAttribute("aria-pressed", String(view.after));
  $("pass").dataset.shows = view.after ? "after" : "before";
}

function listenToPass() {
  const flip = () => {
    view.after = !view.after;
    return drawPass();
  };
  $("flip").addEventListener("click", flip);
  $("pass").addEventListener("click", flip);
  $("pass").addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      flip();
    }
  });
  $("all-windows").addEventListener("change", drawPass);
  $("pass").addEventListener("pointermove", (event) => {
    const pass = run().compactions[view.pass], { blocks } = run();
    if (!pass || !pass.shown) return;
    const { plane, moved, rowHeight, gap, across } = pass.shown;
    const box = $("pass").getBoundingClientRect();
    const w = passRows[Math.floor((event.clientY - box.top - PASS_TOP) / (rowHeight + gap))];
    const inside = Math.floor((event.clientX - box.left - MARGIN.left) / across * WINDOW);
    const block = w * WINDOW + inside;
    if (w === undefined || inside < 0 || inside >= WINDOW || block >= blocks) return;
    const order = plane[2 * blocks + block];
    let text = `block ${number.format(block)}: ${NAMES[plane[block]]}`;
    if (order > 0) text += `, in a page of ${number.format(2 ** (order - 1))}`;
    if (moved.has(block))
      text += `, moved ${view.after ? "from" : "to"} ${number.format(moved.get(block))}`;
    $("pass-readout").textContent = text;
  });
}

// -- series -------------------------------------------------------------------------------------

function layout() {
  const [from, to] = range(), width = $("chart-list").clientWidth - MARGIN.left - MARGIN.right;
  const ticks = timeTicks(from, to, Math.max(2, width / 70));
  const axis = { gridcolor: named("grid"), linecolor: named("line"), zerolinecolor: named("line") };
  return {
    margin: { l: MARGIN.left, r: MARGIN.right, t: 6, b: 28 }, showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
    font: { color: named("soft"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: named("panel"), bordercolor: named("line"), font: { color: named("ink") } },
    xaxis: { ...axis, range: [from, to], tickvals: ticks, ticktext: ticks.map(clock), tickangle: 0,
      ticklabelposition: "outside" },
    yaxis: { ...axis, rangemode: "tozero", fixedrange: true, nticks: 5 },
  };
}

function traces(name) {
  return data.runs.flatMap((r, i) => r.series[name] ? [{
    x: r.times, y: r.series[name], name: r.policy, mode: "lines", type: "scatter",
    line: { color: lineColour(i), dash: DASHES[i % DASHES.length], width: 1.6 },
    customdata: r.times.map(clock), hovertemplate: "%{y:.4~g} at %{customdata}",
  }] : []);
}

const CONFIG = { displayModeBar: false, displaylogo: false, doubleClick: false };

function drawCharts() {
  const names = [...new Set(data.runs.flatMap((r) => Object.keys(r.series)))];
  plots = names.map((name) => {
    const { title, unit } = data.series[name] || { title: name.replaceAll("_", " "), unit: "" };
    const figure = document.createElement("figure"), head = document.createElement("h3");
    const plot = document.createElement("div"), caption = document.createElement("figcaption");
    figure.className = "chart";
    plot.className = "plot";
    const small = document.createElement("span");
    small.textContent = unit ? `, ${unit}` : "";
    head.append(title, small);
    caption.textContent = data.runs.flatMap((r) => {
      const known = (r.series[name] || []).filter((value) => value !== null);
      if (!known.length) return [];
      const mean = known.reduce((a, b) => a + b, 0) / known.length;
      const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
      return [`${r.policy}: ${short(mean)} on average, ${short(low)} to ${short(high)}`];
    }).join("; ");
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title} over time. ${caption.textContent}`);
    figure.append(head, plot, caption);
    $("chart-list").append(figure);
    Plotly.newPlot(plot, traces(name), layout(), CONFIG);
    plot.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    });
    plot.on("plotly_doubleclick", () => zoom(null));
    return { name, plot };
  });
}

function zoom(to) {
  if (to) {
    const [from, until] = whole();
    to = [Math.max(from, to[0]), Math.min(until, to[1])];
    if (to[1] - to[0] <= 0) to = null;
  }
  view.range = to;
  drawMap();
  redrawCharts();
}

function redrawCharts() {
  plots.forEach(({ name, plot }) => Plotly.react(plot, traces(name), layout(), CONFIG));
  $("chart-legend").replaceChildren(...data.runs.map((r, i) => {
    const item = document.createElement("li");
    const dash = { solid: "none", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" }[DASHES[i % DASHES.length]];
    const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
    const line = document.createElementNS(ns, "line");
    for (const [key, value] of Object.entries({ width: 30, height: 10, "aria-hidden": "true" }))
      svg.setAttribute(key, value);
    for (const [key, value] of Object.entries({ x1: 0, y1: 5, x2: 30, y2: 5, "stroke-width": 2.5,
      stroke: lineColour(i), "stroke-dasharray": dash })) line.setAttribute(key, value);
    svg.append(line);
    item.append(svg, r.policy);
    return item;
  }));
}

// -- all together -------------------------------------------------------------------------------

const system = window.matchMedia("(prefers-color-scheme: dark)");

function setTheme() {
  const chosen = document.querySelector("input[name=theme]:checked").value;
  root.dataset.theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
}

async function redraw() {
  if (!data.runs.length) return;
  legend();
  drawMap();
  redrawCharts();
  await drawPass();
}

async function start() {
  setTheme();
  document.querySelectorAll("input[name=theme]").forEach((input) => input.addEventListener("change", () => {
    setTheme();
    redraw();
  }));
  system.addEventListener("change", () => {
    setTheme();
    redraw();
  });
  if (data.runs.length) {
    for (const r of data.runs) r.bytes = await inflate(r.planes);
    $("run").replaceChildren(...data.runs.map((r, i) => new Option(r.policy, i)));
    $("run-label").hidden = data.runs.length < 2;
    $("run").addEventListener("change", async () => {
      view.run = Number($("run").value);
      view.pass = 0;
      listPasses();
      await redraw();
    });
    document.querySelectorAll("input[name=colour]").forEach((input) => input.addEventListener("change", () => {
      view.plane = Number(input.value);
      $("map").dataset.plane = input.value;
      redraw();
    }));
    listenToMap();
    listenToPass();
    listPasses();
    drawCharts();
    await redraw();
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      redraw();
      plots.forEach(({ plot }) => Plotly.Plots.resize(plot));
    });
  }
  root.dataset.ready = "yes";
}

start();
})();
