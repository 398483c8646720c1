// A chart is a canvas that draws the minimum and maximum of each pixel column. All charts share one view.

const view = { axis: "step", smooth: 0, zoom: null, hover: null, hidden: new Set(), charts: [] };
const EXACT = ["lr"]; // has no noise to smooth
const SPIKY = ["examples_per_s", "tokens_per_s", "step_time_ms"]; // a pause causes outliers
const redraw = () => view.charts.forEach((chart) => chart.draw());

function smoothed(series) { // a bias-corrected exponential moving average, as in TensorBoard
  if (!view.smooth || series.split !== "train" || EXACT.includes(series.name)) return series.y;
  if (series.weight !== view.smooth) {
    let mean = 0, left = 1;
    series.weight = view.smooth;
    series.mean = series.y.map((y) => {
      mean = mean * view.smooth + y * (1 - view.smooth);
      left *= view.smooth;
      return mean / (1 - left);
    });
  }
  return series.mean;
}

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * ([1, 2, 5, 10].find((m) => span / (m * power) <= count) || 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [], few = high - low < 1.3; // decades
  for (let decade = Math.floor(low); decade <= high; decade++)
    for (const m of few ? [1, 2, 3, 5] : [1]) {
      const at = decade + Math.log10(m);
      if (at >= low - 1e-9 && at <= high + 1e-9) found.push(10 ** at);
    }
  return found.length > 1 ? found : ticks(10 ** low, 10 ** high, 4);
}

const clock = (seconds, span) => {
  const [unit, scale] = span > 172800 ? ["d", 86400] : span > 7200 ? ["h", 3600] : span > 180 ? ["min", 60] : ["s", 1];
  return +(seconds / scale).toPrecision(4) + " " + unit;
};
const clockScale = (span) => (span > 172800 ? 86400 : span > 7200 ? 3600 : span > 180 ? 60 : 1);

// The points of a chart as CSV (RFC 4180), one line for each point of each run.
function csv(chart) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`, value = (v) => (Number.isNaN(v) ? "" : String(v));
  const lines = chart.series.flatMap((s) => s.y.map((y, i) => [quoted(runs[s.run].name), s.split, s.step[i], value(s.time[i]), value(y)].join(",")));
  return [`run,split,step,seconds,${quoted(chart.name)}`, ...lines, ""].join("\r\n");
}

class Chart {
  constructor(name, parent) {
    this.name = name;
    this.log = this.all = false;
    this.series = runs.flatMap((run, i) =>
      ["train", "eval"].map((split) => ({ name, run: i, split, ...points(run, split, name) })).filter((s) => s.y.length));
    this.canvas = el("canvas", { role: "img", "aria-label": label(name) });
    this.tip = el("div", { class: "tip", hidden: "" });
    const toggle = (key, title, text = key) => {
      const button = el("button", { "aria-pressed": "false", title, "data-toggle": key, onclick: () => {
        this[key] = !this[key];
        button.setAttribute("aria-pressed", this[key]);
        this.draw();
      } }, text);
      return button;
    };
    const strange = runs.reduce((sum, run) => sum + (run.strange[name] || 0), 0);
    const positive = ["loss", "grad_norm", "perplexity", "lr"].includes(name);
    const link = el("a", { class: "csv", href: "#", title: "Download the points as CSV", download: `${name.replace(/[^\w.-]+/g, "_")}.csv`,
      onclick: () => { link.href = "data:text/csv;charset=utf-8," + encodeURIComponent(csv(this)); } }, "csv");
    parent.append(el("div", { class: "card chart", "data-name": name, "data-points": this.series.map((s) => s.y.length).join(" ") },
      el("div", { class: "head" }, el("h3", {}, label(name)), link, positive ? toggle("log", "Logarithmic axis")
        : SPIKY.includes(name) ? toggle("all", "Show the highest and lowest fiftieth too", "outliers") : null),
      this.canvas, strange ? el("div", { class: "note" }, `${strange} not finite`) : null, this.tip));
    this.listen();
    view.charts.push(this);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  shown() { return this.series.filter((s) => !view.hidden.has(s.split) && !view.hidden.has(s.run)); }

  // The pixels: [left, right] of x, [bottom, top] of y. The labels of y have room to their left.
  scales(g) {
    const shown = this.shown(), xs = shown.map((s) => s[view.axis]);
    let [x0, x1] = view.zoom || [Infinity, -Infinity];
    if (!view.zoom) for (const x of xs) if (x.length) { x0 = Math.min(x0, x[0]); x1 = Math.max(x1, x[x.length - 1]); }
    if (!(x1 > x0)) { x0 = Number.isFinite(x0) ? x0 - 0.5 : 0; x1 = x0 + 1; }
    let y0 = Infinity, y1 = -Infinity;
    for (const s of shown) {
      const x = s[view.axis];
      for (let i = 0; i < x.length; i++) {
        const y = s.y[i];
        if (x[i] < x0 || x[i] > x1 || (this.log && y <= 0)) continue;
        if (y < y0) y0 = y;
        if (y > y1) y1 = y;
      }
    }
    if (SPIKY.includes(this.name) && !this.all) [y0, y1] = this.common(shown, x0, x1, y0, y1);
    if (!(y1 >= y0)) { y0 = this.log ? 0.1 : 0; y1 = 1; }
    if (this.log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
    const slack = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    y0 = y0 >= 0 && y0 < slack * 2 && !this.log ? 0 : y0 - slack;
    y1 += slack;
    const marks = this.log ? logTicks(y0, y1) : ticks(y0, y1, 5), texts = labels(marks);
    const left = Math.max(46, ...texts.map((text) => Math.ceil(g.measureText(text).width) + 9));
    const box = { left, right: this.width - 6, top: 8, bottom: this.height - 22 };
    return { ...box, x0, x1, y0, y1, shown, marks, texts,
      x: (v) => box.left + (v - x0) / (x1 - x0) * (box.right - box.left),
      y: (v) => box.bottom - ((this.log ? Math.log10(v) : v) - y0) / (y1 - y0) * (box.bottom - box.top),
      back: (px) => x0 + (px - box.left) / (box.right - box.left) * (x1 - x0) };
  }

  common(shown, x0, x1, y0, y1) { // the range without the highest and lowest 2 %, if these are outliers
    const values = shown.flatMap((s) => s.y.filter((_, i) => s[view.axis][i] >= x0 && s[view.axis][i] <= x1)).sort((a, b) => a - b);
    const low = values[Math.floor(values.length * 0.02)], high = values[Math.ceil(values.length * 0.98) - 1];
    return values.length > 50 && y1 - y0 > 2 * (high - low) ? [low, high] : [y0, y1];
  }

  draw() {
    const { width, height } = this.canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    if (!width) return;
    this.width = width; this.height = height;
    this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "11px " + getComputedStyle(document.body).fontFamily;
    const s = this.at = this.scales(g);
    this.axes(g, s);
    g.save();
    g.beginPath(); g.rect(s.left - 3, s.top - 4, s.right - s.left + 6, s.bottom - s.top + 8); g.clip();
    this.marks(g, s);
    for (const one of s.shown) {
      const own = colour(runs.length > 1 ? one.run : one.split === "eval" ? 1 : 0);
      if (smoothed(one) !== one.y) this.line(g, s, one, one.y, own, 0.22);
      this.line(g, s, one, smoothed(one), own, 1);
    }
    this.pointer(g, s);
    g.restore();
  }

  axes(g, s) {
    const span = s.x1 - s.x0;
    g.lineWidth = 1; g.strokeStyle = paint("faint"); g.fillStyle = paint("muted");
    g.textAlign = "right"; g.textBaseline = "middle";
    s.marks.forEach((v, i) => {
      const y = Math.round(s.y(v)) + 0.5;
      if (y < s.top - 1 || y > s.bottom + 1) return;
      g.beginPath(); g.moveTo(s.left, y); g.lineTo(s.right, y); g.stroke();
      g.fillText(s.texts[i], s.left - 7, y);
    });
    g.textBaseline = "top";
    const count = Math.max(2, Math.floor((s.right - s.left) / 58)), unit = clockScale(span);
    const places = view.axis === "step" ? ticks(s.x0, s.x1, count).filter(Number.isInteger)
      : ticks(s.x0 / unit, s.x1 / unit, count).map((v) => v * unit);
    const texts = view.axis === "step" ? labels(places) : places.map((v) => clock(v, span));
    places.forEach((v, i) => {
      const half = g.measureText(texts[i]).width / 2;
      g.textAlign = "center";
      g.fillText(texts[i], Math.min(Math.max(s.x(v), s.left - 8 + half), s.right - half), s.bottom + 7);
    });
  }

  marks(g, s) { // restarts and faults, faintly
    if (runs.length > 1) return;
    g.setLineDash([2, 3]); g.lineWidth = 1;
    for (const event of runs[0].events) {
      if (!NOTABLE[event.kind]) continue;
      const at = view.axis === "step" ? event.step : event.t - runs[0].start;
      if (!(at > s.x0 && at < s.x1)) continue;
      g.strokeStyle = paint(NOTABLE[event.kind]);
      const x = Math.round(s.x(at)) + 0.5;
      g.beginPath(); g.moveTo(x, s.top); g.lineTo(x, s.bottom); g.stroke();
    }
    g.setLineDash([]);
  }

  line(g, s, one, ys, own, alpha) {
    const xs = one[view.axis], evaluation = one.split === "eval";
    g.globalAlpha = alpha; g.strokeStyle = g.fillStyle = own; g.lineJoin = "round";
    g.lineWidth = evaluation ? 1.5 : 1.4;
    g.setLineDash(evaluation ? [5, 3] : []);
    g.beginPath();
    let from = 0;
    while (from < xs.length - 1 && xs[from + 1] < s.x0) from++;
    let open = false, seen = 0;
    for (let i = from; i < xs.length;) {
      const px = s.x(xs[i]), here = Math.floor(px);
      let low = Infinity, high = -Infinity, first = NaN, last = NaN;
      do {
        if (!(this.log && ys[i] <= 0)) {
          const y = s.y(ys[i]);
          if (Number.isNaN(first)) first = y;
          last = y; low = Math.min(low, y); high = Math.max(high, y);
        }
        i++; seen++;
      } while (i < xs.length && Math.floor(s.x(xs[i])) === here);
      if (Number.isNaN(first)) continue;
      if (open) g.lineTo(px, first); else g.moveTo(px, first);
      if (low < high) { g.lineTo(px, low); g.lineTo(px, high); g.lineTo(px, last); }
      open = true;
      if (px > s.right + 1) break;
    }
    g.stroke();
    g.setLineDash([]);
    if (evaluation ? seen < 80 : xs.length === 1)
      for (let i = from; i < xs.length; i++) {
        if (this.log && ys[i] <= 0) continue;
        g.beginPath(); g.arc(s.x(xs[i]), s.y(ys[i]), 2.4, 0, 7); g.fill();
      }
    g.globalAlpha = 1;
  }

  nearest(one, x) {
    const xs = one[view.axis];
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  pointer(g, s) {
    this.tip.hidden = true;
    if (view.hover === null) return;
    if (view.drag && view.drag.chart === this) {
      const [a, b] = [s.x(view.drag.from), s.x(view.hover)];
      g.globalAlpha = 0.12; g.fillStyle = paint("muted"); g.fillRect(Math.min(a, b), s.top, Math.abs(b - a), s.bottom - s.top);
      g.globalAlpha = 1;
    }
    const x = s.x(view.hover), rows = [];
    g.strokeStyle = paint("muted"); g.globalAlpha = 0.5;
    g.beginPath(); g.moveTo(Math.round(x) + 0.5, s.top); g.lineTo(Math.round(x) + 0.5, s.bottom); g.stroke();
    g.globalAlpha = 1;
    for (const one of s.shown) {
      const i = this.nearest(one, view.hover);
      if (Math.abs(s.x(one[view.axis][i]) - x) > 40 && one.split === "train" && runs.length > 1) continue;
      const own = colour(runs.length > 1 ? one.run : one.split === "eval" ? 1 : 0), y = smoothed(one)[i];
      if (!(this.log && y <= 0)) { g.fillStyle = own; g.beginPath(); g.arc(s.x(one[view.axis][i]), s.y(y), 3, 0, 7); g.fill(); }
      const name = runs.length > 1 ? `${runs[one.run].name} ${one.split}` : one.split;
      const more = smoothed(one) === one.y ? null : el("span", { class: "muted" }, `  mean ${number(y)}`);
      const where = view.axis === "step" ? `step ${one.step[i].toLocaleString("en-US")}` : clock(one.time[i], s.x1 - s.x0);
      rows.push(el("tr", {}, el("td", { style: { color: own } }, name), el("td", { class: "muted" }, where), el("td", {}, number(one.y[i]), more)));
    }
    if (this !== view.over || !rows.length) return;
    this.tip.replaceChildren(el("table", {}, rows));
    this.tip.hidden = false;
    const most = this.canvas.parentElement.clientWidth - this.tip.offsetWidth; // below the curve, so as not to cover it
    this.tip.style.left = Math.max(0, Math.min(most, this.canvas.offsetLeft + x - this.tip.offsetWidth / 2)) + "px";
    this.tip.style.top = this.canvas.offsetTop + this.height + 4 + "px";
  }

  listen() {
    const place = (event) => {
      const px = event.clientX - this.canvas.getBoundingClientRect().left;
      return this.at.back(Math.min(Math.max(px, this.at.left), this.at.right));
    };
    this.canvas.addEventListener("pointermove", (event) => { view.over = this; view.hover = place(event); later(); });
    this.canvas.addEventListener("pointerdown", (event) => {
      view.over = this; view.hover = place(event);
      if (event.pointerType === "mouse" && event.button === 0) view.drag = { chart: this, from: view.hover };
      later();
    });
    this.canvas.addEventListener("pointerleave", () => { if (!view.drag) { view.hover = null; later(); } });
    this.canvas.addEventListener("dblclick", () => zoom(null));
  }
}

addEventListener("pointerup", () => {
  const drag = view.drag;
  if (!drag) return;
  view.drag = null;
  const { at } = drag.chart;
  if (Math.abs(at.x(drag.from) - at.x(view.hover)) > 6) zoom([drag.from, view.hover].sort((a, b) => a - b));
  else later();
});

let waiting = false;
function later() { // draw at most once per frame
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; redraw(); });
}

function zoom(range) {
  view.zoom = range;
  document.getElementById("reset").hidden = !range;
  redraw();
}
