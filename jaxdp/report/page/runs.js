// Several runs: a table that is sorted by a click on a head, and each metric against each numeric key that differs.

const RATES = ["goodput", "mfu", "tokens_per_s", "examples_per_s"];
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const sameKeys = ["run_dir"]; // never compared
const differing = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((key) => !sameKeys.includes(key)
  && new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1);

// The metrics of the last evaluation; of a run without one, the main ones of the last update, by another name.
const metricsOf = (run) => Object.entries(run.numbers).filter(([name, value]) => !["step", "time", ...RATES].includes(name)
  && (isNumber(value) || ["nan", "inf", "-inf"].includes(value))
  && (run.numbers.split !== "train" || ["loss", "accuracy", "perplexity"].includes(name)))
  .map(([name, value]) => [run.numbers.split === "train" ? `${name}, training` : name, value]);
const metrics = several ? runs.map((run) => new Map(metricsOf(run))) : [];
const metricNames = [...new Set(metrics.flatMap((m) => [...m.keys()]))].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
function place(name) { // the main ones first
  const bare = name.replace(", training", "");
  return ["loss", "accuracy", "perplexity", bare].indexOf(bare);
}
const direction = (name) => page.directions[name.replace(", training", "")]; // 1: better if smaller, -1: if larger, 0: not known

function columnsOf(facts) { // {head, show, value} of each column: `value` of a run is what it is sorted by
  const named = { id: "run", head: "run", value: (i) => runs[i].name, down: false, show: (i) => el("span", {}, swatch(i), el("b", {}, breakable(runs[i].name)), " ",
    facts[i].state, el("br"), el("span", { class: "muted" }, facts[i].about)) };
  const keys = differing.map((key) => ({ id: `config ${key}`, head: key, down: false, key: true, value: (i) => runs[i].config[key], show: (i) => show(runs[i].config[key]) }));
  const measured = metricNames.map((name) => ({ id: `metric ${name}`, head: name, down: direction(name) !== 1, metric: name, value: (i) => metrics[i].get(name),
    show: (i) => number(metrics[i].get(name)) }));
  const rest = [...new Set(facts.flatMap((f) => f.rest.map(([name]) => name.replace(/ of .*/, ""))))].map((name) => {
    const cell = (i) => facts[i].rest.find(([n]) => n.replace(/ of .*/, "") === name) || [name, "–", NaN];
    return { id: `fact ${name}`, head: name, down: false, value: (i) => cell(i)[2], show: (i) => cell(i)[1] };
  });
  return [named, ...keys, ...measured, ...rest];
}

function sorted(column) { // indices of runs; what is not a number or missing is last in either direction
  const order = [...runs.keys()];
  if (!column) return order;
  const value = order.map(column.value), down = sorting.down ? -1 : 1, text = (v) => (typeof v === "string" ? v : JSON.stringify(v));
  const kind = (v) => (isNumber(v) ? 0 : v === undefined || v === null || typeof v === "number" || column.metric ? 2 : 1);
  return order.sort((a, b) => kind(value[a]) - kind(value[b]) || (kind(value[a]) === 2 ? 0
    : down * (kind(value[a]) ? text(value[a]).localeCompare(text(value[b])) : value[a] - value[b])));
}

function runsTable(facts) {
  const columns = columnsOf(facts), by = columns.find((c) => c.id === sorting.name);
  const best = new Map(columns.filter((c) => c.metric && direction(c.metric)).map((c) => {
    const values = [...runs.keys()].map(c.value).filter(isNumber);
    return [c, new Set(values).size > 1 ? (direction(c.metric) === 1 ? Math.min(...values) : Math.max(...values)) : NaN];
  }));
  const head = (c, i) => el("th", { class: i ? "n" : null, "aria-sort": c === by ? (sorting.down ? "descending" : "ascending") : null },
    el("button", { class: "sort", title: "Sort", "data-sort": c.id, onclick: () => {
      sorting.down = sorting.name === c.id ? !sorting.down : c.down;
      sorting.name = c.id;
      at("summary").firstChild.replaceWith(runsTable(facts));
    } }, breakable(c.head), c === by ? (sorting.down ? " ▾" : " ▴") : ""));
  const cell = (c, k, i) => el("td", { class: [k ? "n" : "", c.key ? "key" : "", c.value(i) === best.get(c) ? "best" : ""].join(" ").trim() || null,
    title: c.value(i) === best.get(c) ? "best" : null }, c.show(i));
  return el("div", { class: "card runs" }, el("div", { class: "wide" }, el("table", {}, el("tr", {}, columns.map(head)),
    sorted(by).map((i) => el("tr", { "data-run": i }, columns.map((c, k) => cell(c, k, i)))))));
}

function scale(values, from, to) { // logarithmic where the values span more than a factor of 100
  const low = Math.min(...values), high = Math.max(...values), log = low > 0 && high / low > 100, f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)], slack = (b - a) * 0.08 || Math.abs(a) * 0.1 || 1;
  const marks = log ? logTicks(a, b) : ticks(low - slack, high + slack, 4), every = Math.ceil(marks.length / 5);
  return { log, of: (v) => from + (f(v) - a + slack) / (b - a + 2 * slack) * (to - from), marks: marks.filter((_, i) => i % every === 0) };
}

function scatter(key, name) {
  const known = [...runs.keys()].filter((i) => isNumber(runs[i].config[key]) && isNumber(metrics[i].get(name)));
  const missing = runs.length - known.length, [width, height] = [320, 190];
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} against ${key}` });
  if (known.length) {
    const y = scale(known.map((i) => metrics[i].get(name)), height - 24, 6), heights = labels(y.marks);
    const left = Math.max(44, 8 + 7 * Math.max(...heights.map((text) => text.length))); // 7: the width of a digit, at most
    const x = scale(known.map((i) => runs[i].config[key]), left, width - 10), places = labels(x.marks);
    svg.dataset.log = `${x.log} ${y.log}`;
    y.marks.forEach((v, i) => svg.append(el("line", { x1: left, x2: width - 10, y1: y.of(v), y2: y.of(v), stroke: "var(--faint)" }),
      el("text", { x: left - 6, y: y.of(v) + 4, "text-anchor": "end" }, heights[i])));
    x.marks.forEach((v, i) => svg.append(el("text", { x: x.of(v), y: height - 6, "text-anchor": "middle" }, places[i])));
    for (const i of known) {
      const dot = el("circle", { cx: x.of(runs[i].config[key]), cy: y.of(metrics[i].get(name)), r: 4.5, fill: colour(i), "data-run": i });
      dot.append(el("title", {}, `${runs[i].name}: ${key} ${show(runs[i].config[key])}, ${name} ${number(metrics[i].get(name))}`));
      svg.append(dot);
    }
  }
  return el("div", { class: "scatter", "data-key": key }, el("h3", {}, key), svg,
    missing ? el("p", { class: "muted small" }, `${missing} ${missing === 1 ? "run" : "runs"} without a number here`) : null);
}

function against() {
  const section = at("against"), numeric = differing.filter((key) => new Set(runs.map((r) => r.config[key]).filter(isNumber)).size > 1);
  section.hidden = !several || !numeric.length || !metricNames.length;
  if (section.hidden) return;
  const name = metricNames.includes(sorting.metric) ? sorting.metric : metricNames[0];
  const choice = el("select", { "aria-label": "metric", onchange: () => { sorting.metric = choice.value; against(); } },
    metricNames.map((m) => el("option", { value: m, selected: m === name ? "" : null }, m)));
  section.replaceChildren(el("div", { class: "head" }, el("h2", {}, "Metric against config"), choice),
    el("div", { class: "scatters" }, numeric.map((key) => scatter(key, name))));
}
