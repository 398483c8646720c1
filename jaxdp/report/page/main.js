// The page: controls, charts and sections; window.jaxdp is the interface for tests.

const MAIN = Object.keys(LABELS);

function varies(name) { // a metric that is constant over all records needs no curve
  const values = runs.flatMap((r) => ["train", "eval", "final"].flatMap((s) => (r.series[s][name] ? [...r.series[s][name]] : []))).filter((v) => !Number.isNaN(v));
  return values.some((v) => v !== values[0]);
}

function controls() {
  const toggle = (key, shape, text, i) => {
    const button = el("button", { class: "key", "aria-pressed": String(!view.hidden.has(key)), onclick: () => {
      if (view.hidden.has(key)) view.hidden.delete(key); else view.hidden.add(key);
      button.setAttribute("aria-pressed", !view.hidden.has(key));
      redraw();
    } }, el("span", { class: shape, style: i === null ? {} : shape === "dot" ? { background: colour(i) } : { borderColor: colour(i) } }), text);
    return button;
  };
  const keys = several
    ? [...runs.map((run, i) => toggle(i, "dot", run.name, i)), toggle("train", "line", "train", null), toggle("eval", "line dashed", "eval", null)]
    : [toggle("train", "line", "train", 0), ...(runs.some((r) => count(r.series.eval) + count(r.series.final)) ? [toggle("eval", "line dashed", "eval", 1)] : [])];
  const axis = ["step", "time"].map((name) => el("button", { "aria-pressed": String(view.axis === name), "data-axis": name, onclick: () => {
    view.axis = name;
    axis.forEach((b) => b.setAttribute("aria-pressed", b.dataset.axis === name));
    zoom(null);
  } }, name));
  const timed = runs.every((run) => run.series.train.time || run.series.eval.time);
  const shown = el("output", {}, view.smooth ? String(view.smooth) : "off");
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, id: "smooth", oninput: () => {
    view.smooth = +slider.value;
    shown.textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    later();
  } });
  at("controls").replaceChildren(el("div", { class: "keys" }, keys), el("button", { id: "reset", hidden: view.zoom ? null : "", onclick: () => zoom(null) }, "whole range"),
    el("label", {}, "smooth", slider, shown), timed ? el("div", { class: "joined", role: "group", "aria-label": "horizontal axis" }, axis) : "");
}

function everything() {
  for (const id of ["confusion", "media", "histograms", "spent", "events", "bytes", "collectives"]) {
    const section = at(id);
    while (section.children.length > 1) section.lastChild.remove();
  }
  document.querySelector(".pair").classList.toggle("single", runs.length > 4); // a table with a column for each needs the width
  summary(); against(); controls(); confusion(); media(); histograms(); spent(); events(); holds(); sends();
}

function theme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  dressed();
}

function dressed() {
  at("theme").textContent = isDark() ? "☀" : "☾";
  view.hidden.clear();
  everything();
  redraw();
}

const hasValues = (name) => runs.some((r) => ["train", "eval", "final"].some((s) => r.series[s][name]));
const names = [...new Set(runs.flatMap((r) => ["train", "eval"].flatMap((s) => Object.keys(r.series[s]))))].filter((n) => !["step", "time"].includes(n));
// Goodput is one number per run, shown in the summary.
const first = MAIN.filter((n) => n !== "goodput" && hasValues(n) && (varies(n) || n === "loss"));
const rest = names.filter((n) => !MAIN.includes(n) && varies(n)).sort();

restore();
at("theme").addEventListener("click", theme);
systemDark.addEventListener("change", dressed);
at("theme").textContent = isDark() ? "☀" : "☾";
everything();
settings(at("config"), several ? "Config: what differs" : "Config", "config", false);
settings(at("environment"), several ? "Environment: what differs" : "Environment", "environment", true);
changes(at("environment"));
first.forEach((name) => new Chart(name, at("charts")).draw());
if (rest.length) rest.forEach((name) => new Chart(name, at("more").lastElementChild));
else at("more").remove();

if (live) {
  root.dataset.live = "yes";
  setTimeout(reload, 1000 * pause());
}
reopen();

window.jaxdp = { runs, reload, view, redraw, zoom, milliseconds: performance.now() - began, loaded: performance.now() };
root.dataset.ready = "yes";
