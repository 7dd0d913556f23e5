"""How the report looks, and the script with which samples are filtered."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --soft: #f3f4f6; --line: #d5d8de; --text: #1c2430; --dim: #667085;
  --bar: #5b8def; --right: #1a7f4b; --wrong: #c0392b; --mark: #e08a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181d; --soft: #1f242c; --line: #3a414d; --text: #e6e9ee;
  --dim: #98a2b3; --bar: #4f7fd6; --right: #4cc38a; --wrong: #ff7b6b; --mark: #f5b041; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
p.dim, .dim { color: var(--dim); }
.warning { border-left: 4px solid var(--mark); background: var(--soft); padding: 6px 12px; margin: 8px 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.up { color: var(--right); } .down { color: var(--wrong); }
svg.chart { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
.chart .grid { stroke: var(--line); } .chart .axis { fill: var(--dim); text-anchor: middle; }
.chart .row { fill: transparent; } .chart g:hover .row { fill: var(--soft); }
.chart .name { fill: var(--text); text-anchor: end; } .chart .value { fill: var(--dim); }
.chart .bar { fill: var(--bar); } .chart .whisker { stroke: var(--text); fill: none; stroke-width: 1.3; }
.mark { display: inline-block; width: 3px; height: 14px; background: var(--mark); vertical-align: middle; }
.chart .earlier { stroke: var(--mark); stroke-width: 3; }
.filters { display: flex; flex-wrap: wrap; gap: 8px; position: sticky; top: 0; background: var(--ground);
  padding: 10px 0; border-bottom: 1px solid var(--line); z-index: 1; }
.filters input[type=search] { flex: 1 1 220px; }
.filters select, .filters input, button { font: inherit; color: inherit; background: var(--soft);
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; max-width: 260px; }
button:disabled { opacity: .4; }
details.sample { border-bottom: 1px solid var(--line); padding: 6px 0; }
details.sample summary { cursor: pointer; display: flex; gap: 12px; align-items: baseline; }
.sample .verdict { flex: none; width: 78px; white-space: nowrap; font-weight: 600; }
.sample .where { flex: none; width: 240px; }
.sample .short { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.ok { color: var(--right); } .bad { color: var(--wrong); }
pre { background: var(--soft); border-radius: 6px; padding: 8px 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 420px; overflow: auto; margin: 4px 0 10px; font: 13px/1.45 ui-monospace, monospace; }
pre .begin { color: var(--dim); }
h4 { margin: 8px 0 2px; font-size: 13px; color: var(--dim); }
"""

SCRIPT = """
"use strict";
const groups = JSON.parse(document.getElementById("data").textContent);
const all = [];
for (const group of groups) for (const row of group.rows) all.push({group, row});
const byId = (id) => document.getElementById(id);
const filters = {task: byId("task"), subject: byId("subject"), verdict: byId("verdict"), text: byId("text")};
const SIZE = 25;
let found = all, page = 0;

function element(name, attributes, ...children) {
  const node = document.createElement(name);
  Object.assign(node, attributes);
  node.append(...children);
  return node;
}
function options(select, names, everything) {
  select.replaceChildren(new Option(everything, ""), ...names.map((name) => new Option(name, name)));
}
function rawText(row) { return typeof row.raw === "string" ? row.raw : ""; }
const VERDICTS = {
  right: (row) => row.ok, wrong: (row) => !row.ok, tie: (row) => row.tie, cut: (row) => row.cut > 0,
  better: (row) => row.was === false && row.ok, worse: (row) => row.was === true && !row.ok,
};
function matches({group, row}, words) {
  if (filters.task.value && group.task !== filters.task.value) return false;
  if (filters.subject.value && group.subject !== filters.subject.value) return false;
  if (filters.verdict.value && !VERDICTS[filters.verdict.value](row)) return false;
  if (!words) return true;
  return [row.rest, rawText(row), row.gold, ...Object.values(row.extracted)].some(
    (text) => text.toLowerCase().includes(words));
}
function apply() {
  const words = filters.text.value.trim().toLowerCase();
  const set = Object.entries(filters).filter(([, input]) => input.value).map(([name, input]) => [name, input.value]);
  history.replaceState(null, "", "#" + new URLSearchParams(set));
  found = all.filter((item) => matches(item, words));
  page = 0;
  show();
}
function block(title, ...content) { return [element("h4", {textContent: title}), ...content]; }
function body({group, row}) {
  const parts = block("prompt", element("pre", {},
    element("span", {className: "begin", textContent: group.begin}), row.rest));
  if (row.cut) parts.push(element("p", {className: "warning",
    textContent: row.cut + " tokens of the beginning did not fit into the model."}));
  if (typeof row.raw === "string") {
    parts.push(...block("written", element("pre", {textContent: row.raw})));
    const table = element("table", {});
    for (const [name, text] of Object.entries(row.extracted)) {
      const good = row.correct[name];
      table.append(element("tr", {}, element("td", {textContent: name}), element("td", {textContent: text}),
        element("td", {className: good ? "ok" : "bad", textContent: good ? "right" : "wrong"})));
    }
    parts.push(...block("read", table));
  } else {
    const best = Math.max(...row.raw);
    const table = element("table", {});
    row.raw.forEach((value, place) => table.append(element("tr", {},
      element("td", {textContent: row.choices ? row.choices[place] : place}),
      element("td", {className: "number", textContent: value.toFixed(3)}),
      element("td", {textContent: value === best ? "most likely" : ""}))));
    parts.push(...block("log-likelihoods of the choices", table));
  }
  parts.push(...block("right answer", element("pre", {textContent: row.gold})));
  return parts;
}
function entry(item) {
  const {group, row} = item;
  const change = row.was === null || row.was === row.ok ? "" : row.ok ? " ▲" : " ▼";
  const node = element("details", {className: "sample"}, element("summary", {},
    element("span", {className: "verdict " + (row.ok ? "ok" : "bad"),
      textContent: (row.ok ? "right" : "wrong") + change}),
    element("span", {className: "where dim", textContent: group.task + " · " + group.subject + " · " + row.index}),
    element("span", {className: "short",
      textContent: (row.extracted[group.metric] ?? "") + "  |  right: " + row.gold})));
  node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(...body(item)); });
  return node;
}
function show() {
  const last = Math.max(Math.ceil(found.length / SIZE) - 1, 0);
  const part = found.slice(page * SIZE, (page + 1) * SIZE);
  byId("list").replaceChildren(...part.map(entry));
  const right = found.filter(({row}) => row.ok).length;
  byId("count").textContent = found.length + " of " + all.length + " samples, " + right + " right";
  byId("place").textContent = "page " + (page + 1) + " of " + (last + 1);
  byId("back").disabled = page === 0;
  byId("next").disabled = page >= last;
}
function subjects() {
  const task = filters.task.value;
  const names = groups.filter((group) => !task || group.task === task).map((group) => group.subject);
  options(filters.subject, [...new Set(names)], "all subjects");
}
options(filters.task, [...new Set(groups.map((group) => group.task))], "all tasks");
subjects();
filters.task.addEventListener("change", () => { subjects(); apply(); });
filters.subject.addEventListener("change", apply);
filters.verdict.addEventListener("change", apply);
filters.text.addEventListener("input", apply);
byId("back").addEventListener("click", () => { page -= 1; show(); });
byId("next").addEventListener("click", () => { page += 1; show(); });
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  filters.task.value = asked.get("task") ?? "";
  subjects();
  for (const name of ["subject", "verdict", "text"]) filters[name].value = asked.get(name) ?? "";
  apply();
}
window.addEventListener("hashchange", fromAddress);
fromAddress();
"""
