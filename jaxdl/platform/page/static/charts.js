// Curves as SVG: linear and logarithmic axes, smoothing, values under the pointer and by the arrow keys.
"use strict";

let WIDTH = 460; // Of a panel, in pixels: as wide as its column.
const HEIGHT = 240, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 26;
let plots = 0; // Each has a clip of its own.
const NOTES = 4, VALUES = 16; // So many are written below a panel, and at the pointer.
const FEW = 30; // So many points are drawn as such, and not smoothed.
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text = "") {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  return String(Number(value.toPrecision(4)));
}

// Exponential smoothing that is not drawn to its first value (that of Adam's means).
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function ticks(low, high, log) {
  if (log) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const each = Math.max(1, Math.ceil((to - from) / 5)), found = [];
    for (let power = from; power <= to; power += each) found.push(10 ** power);
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (inside.length > 1) return inside;
    return [...new Set([0, 1, 2, 3].map((n) => Number((low * (high / low) ** (n / 3)).toPrecision(2))))].filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

function scale(low, high, start, end, log) {
  const of = log ? Math.log10 : (value) => value;
  const from = of(low), span = of(high) - from || 1;
  return (value) => start + ((of(value) - from) / span) * (end - start);
}

// [low, high] of values with a margin; without outliers nearly all values decide.
function limits(values, log, robust) {
  const sorted = values.filter((value) => !log || value > 0).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const few = sorted.length < 100, far = 100 * (at(0.9) - at(0.1));
  let low = at(robust && !few ? 0.002 : 0), high = at(robust && !few ? 0.995 : 1);
  if (robust && far > 0) { // A run that diverged would flatten all others.
    low = sorted.find((value) => value >= Math.max(low, at(0.1) - far));
    high = sorted.findLast((value) => value <= Math.min(high, at(0.9) + far));
  }
  if (log) return low === high ? [low / 2, high * 2] : [low, high];
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, place) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = place; });
  return best;
}

// The points that the axes can show.
function drawable(points, settings) {
  const keep = points.x.map((x, at) => at).filter((at) => (!settings.logX || points.x[at] > 0) && (!settings.logY || points.y[at] > 0));
  return { x: keep.map((at) => points.x[at]), y: keep.map((at) => points.y[at]) };
}

// The curves of a panel: of one run a colour for each metric, of several one for each run.
function seriesOf(panel, data, settings) {
  const found = [];
  data.runs.forEach((run, number) => {
    if (settings.off.has(run.id)) return;
    panel.metrics.forEach((metric, place) => {
      const curve = run.metrics[metric];
      if (!curve) return;
      const color = data.runs.length > 1 ? number : place;
      const { x, y: raw } = drawable(curve, settings), held = metric.startsWith("eval/");
      // Of a curve that was thinned the points are extremes: the line is that of the means of its parts.
      const means = curve.means.x.length ? drawable(curve.means, settings) : { x, y: raw };
      const y = held || raw.length <= FEW || metric.endsWith("learning_rate") ? means.y : smooth(means.y, settings.smoothing);
      const label = data.runs.length > 1 ? (panel.metrics.length > 1 ? `${run.name} ${metric}` : run.name) : metric;
      found.push({ label, x, raw, meanX: means.x, mean: means.y, y, curve, held, color: color % 8, again: color >= 8, many: data.runs.length > 1, left: curve.x.length - x.length });
    });
  });
  return found;
}

function drawAxes(svg, xs, ys, atX, atY, settings) {
  for (const tick of ticks(ys[0], ys[1], settings.logY)) {
    svg.append(element("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: atY(tick), y2: atY(tick) }));
    svg.append(element("svg:text", { x: LEFT - 6, y: atY(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticks(xs[0], xs[1], settings.logX)) {
    svg.append(element("svg:line", { class: "grid", x1: atX(tick), x2: atX(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    svg.append(element("svg:text", { x: atX(tick), y: HEIGHT - 8, "text-anchor": "middle" }, short(tick)));
  }
}

function drawLine(svg, series, x, values, atX, atY, kind, id) {
  const path = values.map((value, at) => `${at ? "L" : "M"}${atX(x[at]).toFixed(1)} ${atY(value).toFixed(1)}`).join("");
  const classes = [`s${series.color}`, kind, series.held && series.many ? "held" : "", series.again ? "again" : ""].filter(Boolean).join(" ");
  svg.append(element("svg:path", { class: classes, d: path, "clip-path": `url(#${id})` }));
}

function drawPanel(panel, data, settings) {
  const figure = element("figure", { class: "chart" }), head = element("h3", {}, panel.title);
  const all = seriesOf(panel, data, settings), drawn = all.filter((series) => series.x.length);
  const keys = element("span", { class: "keys" });
  if (data.runs.length === 1) drawn.forEach((series) => keys.append(element("span", { class: `swatch s${series.color}` }), `${series.label} `));
  else if (panel.metrics.length > 1) keys.append("solid: training, dashed: evaluation");
  head.append(keys);
  figure.append(head);
  const xs = [Infinity, -Infinity];
  drawn.forEach((series) => series.x.forEach((x) => { xs[0] = Math.min(xs[0], x); xs[1] = Math.max(xs[1], x); }));
  const ys = limits(drawn.flatMap((series) => series.y.concat(series.raw)), settings.logY, settings.robust);
  if (ys === null || !Number.isFinite(xs[0])) {
    figure.append(element("p", { class: "small" }, settings.logY || settings.logX ? "No value is above 0: there is nothing to draw on a logarithmic axis." : "No finite values."));
  } else {
    if (xs[0] === xs[1]) { xs[0] = settings.logX ? xs[0] / 2 : xs[0] - 1; xs[1] = settings.logX ? xs[1] * 2 : xs[1] + 1; }
    figure.append(plot(panel, drawn, xs, ys, settings));
  }
  const outside = ys === null ? 0 : drawn.reduce((sum, series) => sum + series.raw.filter((value) => value < ys[0] || value > ys[1]).length, 0);
  if (outside) figure.append(element("p", { class: "small" }, `${outside} value${outside > 1 ? "s are" : " is"} beyond the axis`));
  notes(all, drawn).forEach((text) => figure.append(element("p", { class: "small" }, text)));
  return figure;
}

function plot(panel, drawn, xs, ys, settings) {
  const words = drawn.map((series) => `${series.label}: ${short(series.raw[series.raw.length - 1])} at ${short(series.x[series.x.length - 1])}`).join("; ");
  const svg = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": `${panel.title}, last values: ${words}. Arrow keys read earlier ones.` });
  const id = `plot-${++plots}`, clip = element("svg:clipPath", { id });
  clip.append(element("svg:rect", { x: LEFT - 3, y: TOP - 3, width: WIDTH - LEFT - RIGHT + 6, height: HEIGHT - TOP - BOTTOM + 6 }));
  svg.append(clip);
  const atX = scale(xs[0], xs[1], LEFT, WIDTH - RIGHT, settings.logX), atY = scale(ys[0], ys[1], HEIGHT - BOTTOM, TOP, settings.logY);
  drawAxes(svg, xs, ys, atX, atY, settings);
  for (const series of drawn) {
    if (series.y !== series.raw) drawLine(svg, series, series.x, series.raw, atX, atY, "raw", id);
    drawLine(svg, series, series.meanX, series.y, atX, atY, "", id);
    if (series.x.length <= FEW) series.x.forEach((x, at) => svg.append(element("svg:circle", { class: `s${series.color}`, cx: atX(x), cy: atY(series.y[at]), r: 2.5, "clip-path": `url(#${id})` })));
  }
  const box = element("div", { class: "values", hidden: "" }), cross = element("svg:line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  follow(svg, box, cross, drawn, atX);
  const whole = element("div");
  whole.append(svg, box);
  return whole;
}

// The first texts, and how many more there are.
function withoutRest(texts, most) {
  return texts.length > most ? texts.slice(0, most).concat(`and ${texts.length - most} more`) : texts;
}

function notes(all, drawn) {
  const missing = [], found = [];
  for (const series of all) {
    if (series.curve.not_finite) missing.push(`${series.label}: ${series.curve.not_finite} value${series.curve.not_finite > 1 ? "s are" : " is"} not finite and not drawn`);
    if (series.left) found.push(`${series.label}: ${series.left} value${series.left > 1 ? "s are" : " is"} not above 0 and not drawn`);
    if (series.curve.num_points > series.curve.x.length) found.push(`${series.label}: ${series.curve.x.length} of ${series.curve.num_points} values are drawn, lowest and highest of each part; the line is of the means of ${series.curve.means.x.length} parts`);
  }
  if (drawn.length === 1 && drawn[0].curve.best) found.push(`best: ${short(drawn[0].curve.best[0])} at step ${drawn[0].curve.best[1]}`);
  return withoutRest(missing.concat(found), NOTES);
}

// The values at one place along the curves: where the pointer is, or where the arrow keys lead.
function follow(svg, box, cross, drawn, atX) {
  if (!drawn.length) return;
  const longest = drawn.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  let place = longest.x.length - 1;
  const show = () => {
    const x = longest.x[place];
    box.replaceChildren(element("div", { class: "muted" }, `at ${x.toLocaleString("en")}`));
    const rows = drawn.map((series) => ({ series, value: series.mean[nearest(series.meanX, x)] })).filter(({ value }) => value !== undefined);
    for (const { series, value } of rows.slice(0, VALUES)) {
      const row = element("div"), of = series.meanX === series.x ? "" : " mean";
      row.append(element("span", { class: `swatch s${series.color}` }), `${series.label}${of} ${short(value)}`);
      box.append(row);
    }
    if (rows.length > VALUES) box.append(element("div", { class: "muted" }, `and ${rows.length - VALUES} more`));
    box.hidden = false;
    cross.setAttribute("x1", atX(x));
    cross.setAttribute("x2", atX(x));
    cross.setAttribute("visibility", "visible");
    const share = atX(x) / WIDTH;
    box.style.left = share > 0.5 ? "auto" : `${100 * share + 2}%`;
    box.style.right = share > 0.5 ? `${100 * (1 - share) + 2}%` : "auto";
    box.style.top = "3rem";
  };
  const hide = () => { box.hidden = true; cross.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), wanted = ((event.clientX - frame.left) / frame.width) * WIDTH;
    place = nearest(longest.x.map(atX), wanted);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    place = Math.min(longest.x.length - 1, Math.max(0, place + step));
    show();
  });
}

function startCharts(charts, news, repeat) {
  const byId = (id) => document.getElementById(id);
  const settings = { smoothing: 0.6, logY: false, logX: false, robust: true, off: new Set() };
  let data = null;
  const address = () => `${charts.dataset.curves}&by=${byId("by").value}${byId("every").checked ? "&all=1" : ""}`;
  const draw = () => {
    if (data === null) return;
    const focused = document.activeElement && document.activeElement.closest(".chart");
    const place = focused ? [...charts.children].indexOf(focused) : -1;
    const column = parseFloat(getComputedStyle(charts).gridTemplateColumns) || charts.clientWidth;
    WIDTH = Math.max(240, Math.floor(column) - 26);
    charts.replaceChildren(...data.panels.map((panel) => drawPanel(panel, data, settings)));
    if (!data.panels.length) charts.append(element("p", { class: "muted" }, "There is no measurement yet."));
    if (place >= 0 && charts.children[place]) { const svg = charts.children[place].querySelector("svg"); if (svg) svg.focus(); }
    const problems = data.runs.flatMap((run) => run.problems.map((problem) => (data.runs.length > 1 ? `${run.name}: ${problem}` : problem)));
    byId("curve-problems").replaceChildren(...problems.map((text) => element("p", { class: "problem" }, text)));
  };
  const legend = () => {
    const box = byId("legend");
    if (data.runs.length < 2 || box.childElementCount === data.runs.length) return;
    box.hidden = false;
    box.replaceChildren(...data.runs.map((run, number) => {
      const label = element("label"), tick = element("input", { type: "checkbox", checked: "" });
      tick.addEventListener("change", () => { settings.off[tick.checked ? "delete" : "add"](run.id); draw(); });
      label.append(tick, element("span", { class: `swatch s${number % 8}${number >= 8 ? " again" : ""}` }), run.name);
      return label;
    }));
  };
  const read = async () => {
    const wanted = address(), fresh = await news(wanted);
    if (fresh === null || wanted !== address()) return;
    data = fresh;
    legend();
    draw();
  };
  const set = (id, name, of) => byId(id).addEventListener("input", () => { settings[name] = of(byId(id)); draw(); });
  set("log-y", "logY", (box) => box.checked);
  set("log-x", "logX", (box) => box.checked);
  set("robust", "robust", (box) => box.checked);
  byId("smoothing").addEventListener("input", () => {
    settings.smoothing = Number(byId("smoothing").value);
    byId("smoothing-value").textContent = byId("smoothing").value;
    draw();
  });
  for (const id of ["by", "every"]) byId(id).addEventListener("change", () => { known.clear(); read().catch(() => {}); });
  read().catch((error) => { charts.replaceChildren(element("p", { class: "problem" }, `The curves cannot be read: ${error.message}`)); });
  repeat(4, read);
  let width = charts.clientWidth;
  new ResizeObserver(() => { if (charts.clientWidth !== width) { width = charts.clientWidth; draw(); } }).observe(charts);
}
