// The data of the file as columns of numbers: runs[i].series.train.loss is a Float64Array, NaN for missing values.

const page = JSON.parse(document.getElementById("data").textContent), runs = page.runs;

Object.setPrototypeOf(page.defaults, null);

const count = (table) => (table.step ? table.step.length : 0); // the number of its records

function column(packed, n, name) {
  const values = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    if (typeof packed[i] === "number") values[i] = packed[i];
    else values[i] = name === "time" ? values[i - 1] || 0 : NaN; // "nan" and "inf" cannot be drawn
  }
  return values;
}

for (const run of runs) {
  run.strange = Object.create(null); // the number of non-finite values by name
  for (const named of [...Object.values(run.series), run.numbers, run.histograms, run.config, run.environment]) Object.setPrototypeOf(named, null); // so that any name can be a key
  for (const table of Object.values(run.series)) {
    const n = count(table);
    for (const name of Object.keys(table)) {
      const odd = table[name].filter((v) => typeof v === "string").length;
      if (odd) run.strange[name] = (run.strange[name] || 0) + odd;
      table[name] = column(table[name], n, name);
    }
  }
  const times = Object.values(run.series).map((t) => (t.time ? t.time[0] : Infinity));
  run.start = Math.min(...run.sessions.map((s) => s.start), ...times);
  run.start = Number.isFinite(run.start) ? run.start : null;
}

// The points of a metric; evaluations end with the final one.
function points(run, split, name) {
  const parts = (split === "eval" ? ["eval", "final"] : [split]).map((s) => run.series[s]);
  const steps = [], times = [], values = [];
  for (const part of parts) {
    if (!part || !part[name]) continue;
    for (let i = 0; i < count(part); i++) {
      if (Number.isNaN(part[name][i])) continue;
      steps.push(part.step[i]);
      times.push(part.time ? part.time[i] - run.start : NaN);
      values.push(part[name][i]);
    }
  }
  return { step: steps, time: times, y: values };
}

const LABELS = {
  loss: "Loss", accuracy: "Accuracy", perplexity: "Perplexity", lr: "Learning rate", grad_norm: "Gradient norm",
  tokens_per_s: "Tokens per second", examples_per_s: "Examples per second", step_time_ms: "Milliseconds per update",
  input_wait: "Share of time waiting for data", mfu: "Model FLOPs utilization", goodput: "Goodput",
};
const label = (name) => (Object.hasOwn(LABELS, name) && LABELS[name]) || name.replaceAll("_", " ");

function number(value, digits = 4) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(+value)) return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(+value)) return String(value);
  if (size < 1e-3) return (+value).toExponential(Math.min(digits - 2, 2));
  return (+value).toFixed(Math.max(0, digits - Math.max(0, Math.ceil(Math.log10(size)))));
}

function short(value, digits = 3) { // a label of an axis
  const size = Math.abs(value);
  if (size >= 1e4) {
    const [scale, unit] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return +(value / scale).toPrecision(digits) + unit;
  }
  if (size && size < 1e-3) return (+value.toPrecision(digits)).toExponential().replace("e-", "e−");
  return String(+value.toPrecision(digits + 1));
}

function labels(values) { // of an axis: with as many digits as tell them apart
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => short(value, digits));
    if (new Set(texts).size === texts.length || digits === 12) return texts;
  }
}

function bytes(value) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= scale) return (value / scale).toFixed(value >= 100 * scale ? 0 : value >= 10 * scale ? 1 : 2) + " " + unit;
  return Math.round(value) + " B";
}

function duration(seconds) {
  if (seconds === undefined || seconds === null || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return Math.round(1000 * seconds) + " ms";
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const percent = (share) => (share >= 0.9995 || share < 0.0005 ? Math.round(100 * share) : (100 * share).toFixed(1)) + " %";

// Okabe and Ito's colours, distinguishable for colour-blind people, in the order of contrast with the page.
const PALETTE = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b"],
  dark: ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#a0a0a0"],
};
const root = document.documentElement;
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
const colour = (i) => PALETTE[isDark() ? "dark" : "light"][i] || `hsl(${(i * 137.5) % 360} 60% ${(isDark() ? 72 : 30) - 6 * (i % 3)}%)`; // for further runs
const paint = (name) => { // a colour of the style sheet, in the format of the canvas
  root.style.setProperty("outline-color", `var(--${name})`);
  return getComputedStyle(root).outlineColor;
};

const breakable = (text) => text.split(/(?<=[._,=])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])); // a long name, in several lines

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "circle", "path", "text", "g", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name === "style" && typeof value === "object") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}
