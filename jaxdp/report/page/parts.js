// The sections beside the curves: each fills its element from the runs, and names data that is missing.

const NOTABLE = { resume: "good", failed: "bad", preempted: "note", rolled_back: "bad", skipped: "muted", save_failed: "bad",
  checkpoint_refused: "bad", stopped: "bad", regroup: "note", audit: "note", audit_failed: "bad",
  stopped_early: "note" };
const WORDS = { start: "started", resume: "resumed", first_update: "first update done", evaluation: "evaluated", saved: "saved",
  preempted: "preempted", rolled_back: "rolled back", skipped: "updates skipped", failed: "failed", finished: "finished",
  save_failed: "could not save", checkpoint_refused: "checkpoint refused",
  regroup: "regrouped", audit: "audit", audit_failed: "wrong device", stopped_early: "stopped early",
  stopped: "ended without a final event" };
const sorting = { name: "", down: false, metric: "" }; // the column by which runs are sorted, and the metric of the scatter plots
const several = runs.length > 1;
const at = (id) => document.getElementById(id);
const swatch = (i) => el("span", { class: "dot", style: { background: colour(i) } });
const named = (run, i) => (several ? el("h3", {}, swatch(i), " ", run.name) : null);
const table = (head, rows) => el("div", { class: "wide" }, el("table", {},
  head ? el("tr", {}, head.map((h, i) => el("th", { class: i ? "n" : null }, breakable(h)))) : null, rows));
const row = (cells, attributes = {}) => el("tr", attributes, cells.map((c, i) => el("td", { class: i ? "n" : null }, c)));

const commitOf = (run) => {
  const commit = run.environment["git.commit"];
  return typeof commit === "string" && commit ? `commit ${commit.slice(0, 7)}${run.environment["git.changed"] === true ? " + changes" : ""}` : null;
};

function changes(section) { // not committed when the run started
  if (several || !runs[0].diff) return;
  section.hidden = false;
  const kind = (line) => ({ "+": "added", "-": "removed", "@": "hunk" }[line[0]] || null);
  section.append(el("details", { id: "diff" }, el("summary", {}, "Uncommitted changes at the start"),
    el("pre", {}, runs[0].diff.split("\n").map((line) => el("span", { class: kind(line) }, line + "\n")))));
}

function best(run) { // of the metric by which checkpoints are kept: the tile with its best value and step, the earliest of equals
  const metric = run.config["checkpoint.best"], mode = run.config["checkpoint.mode"];
  if (!metric) return [];
  const sign = mode ? (mode === "min" ? 1 : -1) : direction(metric);
  const { step, y } = sign ? points(run, "eval", metric) : { y: [] };
  const i = y.reduce((found, value, k) => (found < 0 || sign * value < sign * y[found] ? k : found), -1);
  return i < 0 ? [] : [[`best ${metric}, step ${step[i].toLocaleString("en-US")}`, number(y[i])]];
}

function summary() {
  const facts = runs.map((run) => {
    const found = run.numbers, spent = run.spent, layout = run.layout || {};
    const last = Math.max(...Object.values(run.series).map((s) => (s.step ? s.step[s.step.length - 1] : 0)));
    const goodput = found.goodput ?? (spent.total ? spent.updates / spent.total : undefined);
    const rate = ["tokens_per_s", "examples_per_s"].find((k) => k in found);
    const model = (run.config["model.target"] || "").split(".").pop(), data = (run.config["data.target"] || "").split(".").pop();
    const many = layout.devices ? `${layout.devices} × ${run.environment["devices.kind"] || "device"}` : null;
    const start = run.start ? new Date(1000 * run.start).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : null;
    return {
      state: el("span", { class: `pill ${run.state.word}`, title: run.state.reason }, run.state.word),
      about: [model, data, commitOf(run), layout.parameters && `${layout.parameters.toLocaleString("en-US")} parameters`, many, start].filter(Boolean).map((part) => part.replaceAll(" ", "\u00a0")).join(" · "),
      numbers: ["loss", "accuracy", "perplexity"].filter((k) => k in found).map((k) => [`${k}, ${found.split === "train" ? "training" : "evaluation"}`, number(found[k])]),
      rest: [ // name, text, value
        ["updates" + (run.steps ? ` of ${run.steps.toLocaleString("en-US")}` : ""), last.toLocaleString("en-US"), last],
        ...(spent.total ? [["duration", duration(spent.total), spent.total]] : []),
        ...(rate ? [[rate === "tokens_per_s" ? "tokens a second" : "examples a second", number(found[rate]), found[rate]]] : []),
        ...("mfu" in found ? [["MFU", percent(found.mfu), found.mfu]] : []),
        ...(goodput !== undefined ? [["goodput", percent(goodput), goodput]] : []),
      ],
    };
  });
  at("title").textContent = several ? `${runs.length} runs` : runs[0].name;
  if (!several) {
    at("subtitle").textContent = facts[0].about;
    at("summary").replaceChildren(
      el("p", { style: { margin: "-10px 0 16px" } }, facts[0].state, " ", el("span", { class: "muted small" }, live ? `as of ${clockTime}; this page reloads itself` : runs[0].state.reason)),
      el("div", { class: "card tiles" }, [...facts[0].numbers, ...best(runs[0]), ...facts[0].rest].map(([name, value]) => el("div", {}, el("span", {}, name), el("b", {}, value)))));
    return;
  }
  at("subtitle").textContent = runs.map((r) => r.name).join(", ") + (live ? ` · as of ${clockTime}; this page reloads itself until all runs have ended` : "");
  at("summary").replaceChildren(runsTable(facts));
}

function confusion() { // rows: the classes, columns: the predictions; each cell darker with its share of the row
  const section = at("confusion");
  section.hidden = !runs.some((run) => run.confusion.counts);
  runs.forEach((run, i) => {
    const { step, names, counts } = run.confusion;
    if (counts) section.append(el("div", { class: "run" }, named(run, i), el("div", { class: "wide" }, matrix(names, counts)),
      el("p", { class: "muted small" }, `Step ${step.toLocaleString("en-US")}. Rows: the class; columns: the prediction. Point at a cell for its number.`)));
  });
}

function matrix(names, counts) {
  const n = names.length, size = Math.max(11, Math.min(40, Math.floor(640 / n))), font = Math.min(12, size - 2);
  const texts = names.map((name) => (name.length > 24 ? name.slice(0, 23) + "…" : name));
  const edge = Math.ceil(Math.max(...texts.map((text) => text.length)) * 0.62 * font) + 12, whole = edge + n * size;
  const svg = el("svg", { width: whole, height: whole, viewBox: `0 0 ${whole} ${whole}`, role: "img", "aria-label": "confusion matrix", style: { width: `${whole}px` } },
    el("rect", { x: edge, y: edge, width: n * size, height: n * size, fill: "var(--faint)" }));
  texts.forEach((text, i) => {
    const middle = edge + (i + 0.5) * size;
    svg.append(el("text", { x: edge - 6, y: middle + 0.35 * font, "text-anchor": "end", style: { fontSize: `${font}px` } }, text),
      el("text", { transform: `translate(${middle + 0.35 * font} ${edge - 6}) rotate(-90)`, style: { fontSize: `${font}px` } }, text));
  });
  counts.forEach((row, i) => row.forEach((count, k) => {
    if (!count) return;
    const total = row.reduce((a, b) => a + b, 0), share = Math.sqrt(count / total), x = edge + k * size, y = edge + i * size;
    const cell = el("g", {}, el("title", {}, `${names[i]} as ${names[k]}: ${count.toLocaleString("en-US")} of ${total.toLocaleString("en-US")}`),
      el("rect", { x, y, width: size - 1, height: size - 1, fill: colour(i === k ? 0 : 1), opacity: 0.15 + 0.85 * share }));
    const text = short(count), small = Math.min(12, (size - 4) / (0.62 * text.length));
    if (small >= 8) cell.append(el("text", { x: x + size / 2, y: y + size / 2 + 0.35 * small, "text-anchor": "middle", style: { fontSize: `${small}px`, fill: share > 0.6 ? "var(--card)" : "var(--text)" } }, text));
    svg.append(cell);
  }));
  return svg;
}

function media() { // images and texts of callbacks, by name, the steps from left to right
  const section = at("media"), all = runs.flatMap((run) => run.media.items), omitted = runs.reduce((sum, run) => sum + run.media.omitted, 0);
  section.hidden = !all.length && !omitted;
  for (const name of new Set(all.map((item) => item.name))) runs.forEach((run, i) => {
    const items = run.media.items.filter((item) => item.name === name);
    if (!items.length) return;
    const strip = el("div", { class: "strip", tabindex: 0 }, items.reverse().map(({ step, image, text }) => el("figure", {},
      image ? el("img", { src: image, alt: `${name}, step ${step}` }) : el("pre", {}, text),
      el("figcaption", { class: "muted small" }, `step ${step.toLocaleString("en-US")}`))));
    section.append(el("div", { class: "run" }, el("h3", {}, several ? swatch(i) : null, several ? ` ${run.name}: ${name}` : name), strip));
  });
  if (omitted) section.append(el("p", { class: "muted small" }, `${omitted} ${omitted === 1 ? "file" : "files"} left out: too large, or the page has enough of later steps.`));
}

function histograms() { // of one run: steps from left to right, values upwards, darker where there are more
  const section = at("histograms"), names = Object.keys(runs[0].histograms);
  section.hidden = !names.length;
  section.append(el("div", { class: "scatters" }, names.map((name) => el("div", { class: "histogram" }, el("h3", {}, name), heat(runs[0].histograms[name], name)))));
}

function heat(columns, name) {
  const low = Math.min(...columns.map((c) => c.low)), high = Math.max(...columns.map((c) => c.high)), ink = paint("note");
  const canvas = el("canvas", { width: 640, height: 240, role: "img", "aria-label": `histograms of ${name}`, "data-columns": columns.length });
  const g = canvas.getContext("2d"), wide = canvas.width / columns.length, y = (v) => canvas.height * (1 - (v - low) / (high - low));
  g.fillStyle = ink;
  columns.forEach(({ low: from, high: to, counts }, i) => counts.forEach((n, k) => {
    const size = (to - from) / counts.length, top = y(from + (k + 1) * size), bottom = y(from + k * size);
    g.globalAlpha = Math.sqrt(n / (Math.max(...counts) || 1)); // so that few are seen
    g.fillRect(i * wide, top, Math.ceil(wide), Math.max(bottom - top, 1));
  }));
  return [el("div", { class: "muted small" }, short(high)), canvas, el("div", { class: "muted small ends" }, el("span", {}, short(low)),
    el("span", {}, `step ${columns[0].step.toLocaleString("en-US")} to ${columns.at(-1).step.toLocaleString("en-US")}`))];
}

const stack = (parts, whole) => el("div", { class: "stack" }, parts.filter((p) => p[1] > 0).map(([name, value, i]) =>
  el("div", { title: name, style: { background: i < 0 ? "var(--line)" : colour(i), width: `${(100 * value) / whole}%` } })));

function spent() {
  const NAMES = [["updates", "updates: computing and sending", 0], ["input", "waiting for data", 1], ["evaluation", "evaluation", 2],
    ["saving", "held up by saving", 3], ["starting", "starting, compiling", 4], ["again", "updates lost and made again", 5],
    ["down", "nothing ran", 6], ["other", "the rest", -1]];
  const found = runs.map((run) => run.spent), fill = (c) => (c < 0 ? "var(--line)" : colour(c)), some = found.some((f) => f.total);
  const stacks = runs.map((run, i) => (found[i].total ? el("div", { class: "run" }, named(run, i),
    stack(NAMES.map(([key, name, c]) => [name, found[i][key], c]), found[i].total)) : null));
  const share = (f, key) => (!f.total ? ["–"] : several ? [`${percent(f[key] / f.total)}`] : [duration(f[key]), percent(f[key] / f.total)]);
  const rows = NAMES.filter(([key]) => found.some((f) => f[key] > 0)).map(([key, name, c]) =>
    row([el("span", {}, el("span", { class: "dot", style: { background: fill(c) } }), name), ...found.flatMap((f) => share(f, key))]));
  const updates = runs.map(update), head = several ? ["", ...runs.map((r) => r.name)] : null;
  at("spent").hidden = !some && !updates.some(Boolean);
  if (at("spent").hidden) return;
  const cells = (key) => updates.map((u) => (u ? (u[key] === null ? "not measured" : `${number(u[key], 3)} ms`) : "–"));
  at("spent").append(...stacks.filter(Boolean), table(head, rows),
    some ? "" : el("p", { class: "muted small" }, "No events were logged: only updates were timed."),
    el("h2", { style: { margin: "18px 0 6px" } }, "An update"),
    table(several ? head : null, [row(["median time", ...cells("time")]), row(["of it waiting for data", ...cells("waited")])]),
    el("p", { class: "muted small" }, "Communication is part of the device's time and not measured separately; ",
      el("code", {}, "profile.start"), " writes a trace that separates them."));
}

function update(run) { // uses the median: a record after a pause is an outlier
  const { step_time_ms: all, input_wait: waits } = run.series.train;
  const order = [...(all || []).keys()].filter((i) => !Number.isNaN(all[i])).sort((a, b) => all[a] - all[b]);
  if (!order.length) return null;
  const total = order.reduce((sum, i) => sum + all[i], 0), time = all[order[order.length >> 1]];
  return { time, waited: waits ? (time * order.reduce((sum, i) => sum + all[i] * (waits[i] || 0), 0)) / total : null };
}

function events() {
  const section = at("events"), known = runs.filter((r) => r.sessions.length);
  section.hidden = !known.length;
  if (section.hidden) return;
  const span = Math.max(...known.map((r) => r.sessions.at(-1).end - r.start), 1e-3);
  const width = Math.max(section.clientWidth - 42, 240), tall = 46; // in pixels, so that text keeps its size
  const svg = el("svg", { viewBox: `0 0 ${width} ${known.length * tall + 22}`, role: "img", "aria-label": "events over time" });
  const x = (t) => 6 + (t / span) * (width - 12);
  known.forEach((run, lane) => {
    const most = Math.max(...run.sessions.map((s) => s.processes || 1));
    const y = lane * tall + 26, mark = (e, node) => svg.append(node) || node.append(el("title", {}, describe(run, e)));
    for (const s of run.sessions) {
      const left = x(s.start - run.start);
      const bar = el("rect", { x: left, y, width: Math.max(x(s.end - run.start) - left, 1.5), height: 8, rx: 2, fill: colour(several ? runs.indexOf(run) : 0), opacity: 0.25 + 0.6 * (s.processes || 1) / most });
      svg.append(bar);
      bar.append(el("title", {}, `${s.processes || 1} processes from step ${s.first.toLocaleString("en-US")}, ${duration(s.end - s.start)}`));
    }
    for (const e of run.events) {
      const px = x(e.t - run.start);
      if (e.kind === "saved") mark(e, el("rect", { x: px - 0.75, y: y + 9, width: 1.5, height: 6, fill: "var(--muted)" }));
      else if (NOTABLE[e.kind]) mark(e, el("path", { d: `M${px} ${y - 2} l-5 -8 h10 z`, fill: `var(--${NOTABLE[e.kind]})` }));
    }
  });
  for (const t of ticks(0, span / clockScale(span), 5)) {
    const px = x(t * clockScale(span));
    svg.append(el("text", { x: px, y: known.length * tall + 16, "text-anchor": px < 20 ? "start" : px > width - 24 ? "end" : "middle" }, clock(t * clockScale(span), span)));
  }
  section.append(svg, el("p", { class: "muted small" }, "Bars: training, darker with more processes. Below them: saves. Above: restarts, faults, skipped updates."));
  runs.forEach((run, i) => {
    const times = (kind) => run.events.filter((e) => e.kind === kind).length;
    const counts = [["saved", "saves"], ["evaluation", "evaluations"], ["resume", "restarts"], ["regroup", "regroupings"], ["preempted", "preemptions"],
      ["rolled_back", "rollbacks"], ["failed", "failures"]].filter(([k]) => times(k)).map(([k, name]) => `${times(k)} ${times(k) === 1 ? name.slice(0, -1) : name}`);
    const listed = run.events.filter((e) => NOTABLE[e.kind] || e.kind === "start" || e.kind === "finished").slice(-200);
    section.append(el("div", { class: "run" }, named(run, i), el("div", { class: "small", style: { margin: "8px 0" } }, counts.join(" · ")),
      el("details", listed.length < 9 && !several ? { open: "" } : {}, el("summary", {}, "As a list"),
        table(null, listed.map((e) => el("tr", {}, el("td", { class: "muted", style: { whiteSpace: "nowrap" } }, e.t ? duration(e.t - run.start) : "–"), el("td", {}, said(e))))))));
  });
}

const said = (e) => [WORDS[e.kind] || e.kind.replaceAll("_", " "), e.kind !== "start" && e.step ? `step ${e.step.toLocaleString("en-US")}` : null,
  e.updates ? `${e.updates} of them` : null, e.to !== undefined ? `to step ${e.to}` : null,
  e.kind === "resume" && e.processes > 1 ? `${e.processes} processes` : null, e.again ? `${e.again} updates again` : null, e.reason || null].filter(Boolean).join(", ");
const describe = (run, e) => `${said(e)} (${duration(e.t - run.start)})`;

function holds() {
  const TREES = [["params", "parameters"], ["grads", "gradients"], ["opt_state", "optimizer state"], ["model_state", "model state"],
    ["batch", "batch"], ["temporaries", "temporaries (the compiler's)"]];
  const known = runs.map((run) => {
    const held = { ...(run.layout.bytes_per_device || {}) }, program = run.layout.program;
    if (program) held.temporaries = Math.max(program.temporaries - (held.grads || 0), 0);
    return held;
  });
  at("bytes").hidden = !known.some((k) => Object.keys(k).length);
  if (at("bytes").hidden) return;
  const most = Math.max(...known.map((k) => Object.values(k).reduce((a, b) => a + b, 0)), 1);
  at("bytes").append(...known.map((held, i) => el("div", { class: "run" }, named(runs[i], i), stack(TREES.map(([key, name], c) => [name, held[key] || 0, c]), most))),
    table(several ? ["", ...runs.map((r) => r.name)] : null, TREES.filter(([key]) => known.some((k) => k[key])).map(([key, name]) =>
      row([el("span", {}, swatch(TREES.findIndex((t) => t[0] === key)), name), ...known.map((k) => (k[key] === undefined ? "–" : bytes(k[key])))]))),
    el("p", { class: "muted small" }, "From shapes and layout", known.some((k) => "temporaries" in k) ? "; temporaries, less the gradients, as compiled." : "; the compiler's temporaries are not known."));
}

function sends() {
  const section = at("collectives");
  section.hidden = !runs.some((run) => run.layout.devices > 1);
  section.append(...runs.map((run, i) => {
    const { devices, program } = run.layout, found = program ? Object.entries(program.collectives) : [];
    const said = !devices ? "Not recorded with this run." : devices === 1 ? "One device: no communication."
      : !program ? "The program's text was not available; jaxdp plan reports it." : !found.length ? "Nothing." : null;
    const held = run.layout.bytes_per_device || {};
    return el("div", { class: "run" }, named(run, i), said ? el("p", { class: "muted small" }, said) : [
      table(["kind", "times", "bytes", "on the wire"], found.map(([kind, t]) => row([kind, number(t.count), bytes(t.bytes), bytes(t.wire)]))),
      el("p", { class: "muted small" }, `${bytes(found.reduce((sum, f) => sum + f[1].wire, 0))} on the wire`, run.layout.parts > 1 || !held.params ? "" :
        `, ${number(found.reduce((sum, f) => sum + f[1].wire, 0) / held.params, 3)} times the parameters`, `; ${devices} devices. From the compiled program.`)]);
  }));
}

const show = (value) => (value === null || value === undefined ? "–" : Array.isArray(value) && value.every((v) => typeof v === "string") ? value.join(" ") || "[]" : typeof value === "object" ? JSON.stringify(value) : String(value));

function settings(section, title, key, folded) {
  const keys = [...new Set(runs.flatMap((r) => Object.keys(r[key])))];
  const differ = keys.filter((k) => new Set(runs.map((r) => JSON.stringify(r[key][k]))).size > 1);
  const isSet = (k) => key === "config" && JSON.stringify(runs[0].config[k]) !== JSON.stringify(page.defaults[k]);
  const pairs = (names) => el("dl", { class: "pairs" }, names.map((k) => el("div", { class: isSet(k) ? "set" : null }, el("dt", {}, k), el("dd", {}, show(runs[0][key][k])))));
  section.hidden = !keys.length;
  section.append(el("h2", {}, title));
  const set = keys.filter(isSet), others = keys.filter((k) => !isSet(k));
  if (!several && set.length) return section.append(pairs(set), others.length ? el("details", {}, el("summary", {}, `${others.length} keys at their defaults`), pairs(others)) : "");
  if (!several) return section.append(folded ? el("details", {}, el("summary", {}, `${keys.length} keys`), pairs(keys)) : pairs(keys));
  section.append(differ.length ? el("div", { class: "differences" }, table(["differs", ...runs.map((r) => r.name)], differ.map((k) => row([k, ...runs.map((r) => show(r[key][k]))]))))
    : el("p", { class: "muted small" }, "No differences."),
  el("details", {}, el("summary", {}, `${keys.length - differ.length} keys that are the same`), pairs(keys.filter((k) => !differ.includes(k)))));
}
