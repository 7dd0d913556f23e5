"""Style and script of the page. The script only shows what the data attributes of a token say; without it the browser
shows the same at the lower edge."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f8; --panel: #ffffff; --text: #20262c; --quiet: #5d6873; --edge: #dde2e6; --faint: #eef1f3;
  --context: #4c5761; --loss: #c9efd8; --loss-text: #06371f; --loss-solid: #2a9d5f;
  --other: #ffdfa8; --other-text: #573500; --other-solid: #d98a00; --warning: #a23b00; --link: #1c5fb8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --panel: #1c2024; --text: #e6e9ec; --quiet: #98a3ad; --edge: #31383f; --faint: #252b30;
    --context: #aab4bd; --loss: #14492e; --loss-text: #d3f8e2; --loss-solid: #3cba78;
    --other: #5c3f08; --other-text: #ffe6ba; --other-solid: #e5a52f; --warning: #ff9d66; --link: #7db4ff;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 3.4rem; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
h1 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
h1 small { font-weight: 400; color: var(--quiet); font-size: .95rem; }
header, main { max-width: 78rem; margin: 0 auto; padding: 1.2rem 1.4rem 0; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin-top: .9rem; }
.facts > * { flex: 1 1 22rem; min-width: 0; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem 1.1rem; margin: 0;
  align-content: start; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.skipped { grid-column: 2; color: var(--quiet); font-size: .9rem; overflow-wrap: anywhere; }
.warning { color: var(--warning); margin: .6rem 0 0; }
.lengths { border-collapse: collapse; font-size: .85rem; width: 100%; max-width: 34rem; align-self: flex-start; }
.lengths caption { text-align: left; color: var(--quiet); font-size: .95rem; }
.lengths td, .lengths th { padding: .05rem .7rem .05rem 0; text-align: right; font-weight: 400; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.lengths td:last-child { width: 100%; padding: 0; }
.bar { display: block; height: .7rem; min-width: 2px; border-radius: 2px; background: var(--link); opacity: .7; }
.top { position: sticky; top: 0; z-index: 2; margin-top: 1.2rem; background: var(--page);
  border-bottom: 1px solid var(--edge); }
.top > div { max-width: 78rem; margin: 0 auto; padding: .5rem 1.4rem; display: flex; flex-wrap: wrap;
  gap: .3rem 1.6rem; align-items: center; font-size: .88rem; color: var(--quiet); }
.top nav { display: flex; gap: .3rem; overflow-x: auto; flex: 1 1 14rem; padding: .1rem 0; }
.top nav a { border: 1px solid var(--edge); border-radius: 4px; padding: 0 .5rem; background: var(--panel);
  font-variant-numeric: tabular-nums; }
.legend > span { margin-right: 1.1rem; display: inline-block; }
.legend mark, .legend .c, .legend .s { font: 13px/1.5 ui-monospace, monospace; padding: .05rem .3rem; }
section { margin-bottom: 1.6rem; background: var(--panel); border: 1px solid var(--edge); border-radius: 8px; }
.head { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: baseline; padding: .55rem 1rem .45rem; }
.head + .head, .tokens + .head { border-top: 1px solid var(--edge); }
h2, h3 { font-size: 1rem; margin: 0; }
h3 { color: var(--quiet); }
.figures { color: var(--quiet); font-size: .88rem; font-variant-numeric: tabular-nums; }
.head .turn { margin-left: auto; font-size: .88rem; }
.strip { display: block; width: 100%; height: 6px; background: var(--faint); }
.strip rect { fill: var(--loss-solid); }
.tokens { padding: .7rem 1rem .9rem; font: 13.5px/1.75 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--context); tab-size: 4; }
mark { background: var(--loss); color: var(--loss-text); border-radius: 3px; padding: .12em 0;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
mark b { font-weight: 600; -webkit-user-select: none; user-select: none; }
mark.other { background: var(--other); color: var(--other-text); }
.t { border-radius: 2px; }
.tokens:hover .t { box-shadow: inset 1px 0 color-mix(in srgb, currentColor 28%, transparent); }
.tokens .t:hover { outline: 1.5px solid currentColor; box-shadow: none; }
.s { font-weight: 600; opacity: .8; border-radius: 3px; background: color-mix(in srgb, currentColor 11%, transparent); }
.unknown { color: var(--warning); font-weight: 600; }
i { font-style: normal; opacity: .5; -webkit-user-select: none; user-select: none; }
.left-out, .part, .padding { font: .82rem/1.5 system-ui, sans-serif; color: var(--quiet); -webkit-user-select: none;
  user-select: none; }
.left-out { border: 1px dashed var(--edge); border-radius: 4px; padding: .1rem .5rem; margin: 0 .3rem;
  white-space: nowrap; }
.part { display: flex; gap: .8rem; align-items: center; margin: .7rem 0 .2rem; white-space: normal; }
.part:first-child { margin-top: 0; }
.part::after { content: ""; flex: 1; border-top: 1px solid var(--edge); }
.padding { display: block; margin-top: .7rem; padding-top: .5rem; border-top: 1px dashed var(--edge); }
#tip { position: fixed; z-index: 3; display: none; max-width: 30rem; padding: .35rem .6rem; border-radius: 6px;
  background: var(--text); color: var(--page); font-size: .82rem; line-height: 1.45; white-space: pre-wrap;
  overflow-wrap: anywhere; pointer-events: none; }
footer { max-width: 78rem; margin: 0 auto; padding: 0 1.4rem 2rem; color: var(--quiet); font-size: .85rem; }
@media print { .top { position: static; } mark { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""

WITHOUT_SCRIPT = """
.tokens .t:hover::after { content: attr(data-tip); position: fixed; left: 0; right: 0; bottom: 0; padding: .4rem 1rem;
  background: var(--text); color: var(--page); font: .85rem/1.4 system-ui, sans-serif; white-space: pre-wrap; }
"""

SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("mouseover", (event) => {
  const token = event.target.closest(".t");
  tip.style.display = token ? "block" : "none";
  if (!token) return;
  tip.textContent = token.dataset.tip;
  const lines = token.getClientRects(), line = lines[0], height = tip.offsetHeight;
  const below = lines[lines.length - 1].bottom + 6;
  tip.style.left = Math.max(8, Math.min(line.left, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (below + height < innerHeight ? below : line.top - height - 6) + "px";
});
document.addEventListener("scroll", () => { tip.style.display = "none"; }, true);
"""
