// A page of a run that is not finished reloads itself; what was chosen and the scroll position survive in the history's entry.

const live = runs.some((run) => run.state.word === "running");
const clockTime = new Date(1000 * page.written).toLocaleTimeString([], { timeStyle: "medium" });

// Seconds to the next reload: longer if the page was not rewritten for long, as after the process was killed.
const pause = () => Math.min(Math.max(5, (Date.now() / 1000 - page.written) / 10), 600);

function reload() {
  if (view.drag || !getSelection().isCollapsed) return void setTimeout(reload, 1000); // somebody uses it just now
  const { axis, smooth, zoom, hidden } = view, open = [...document.querySelectorAll("details")].map((d) => d.open);
  const chosen = { axis, smooth, zoom, hidden: [...hidden], open, theme: root.dataset.theme, sorting, y: scrollY };
  try { history.replaceState(chosen, ""); } catch { /* a page inside another one may not */ }
  location.reload();
}

function restore() { // before anything is drawn
  const { axis, smooth, zoom, hidden, theme, sorting: order } = history.state || {};
  if (!axis) return;
  Object.assign(view, { axis, smooth, zoom, hidden: new Set(hidden) });
  Object.assign(sorting, order);
  if (theme) root.dataset.theme = theme;
}

function reopen() { // afterwards
  const { open = [], y = 0 } = history.state || {};
  document.querySelectorAll("details").forEach((d, i) => { if (i in open) d.open = open[i]; });
  if (y) scrollTo(0, y);
}
