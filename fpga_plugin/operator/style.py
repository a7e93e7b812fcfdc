"""Looks and refresh of the status page, as text.

Colours keep WCAG's contrast of 4.5 to 1 for text, in light and in dark; tests/unit/test_page.py
computes it.
"""

from typing import Final

LIGHT: Final = {
    "page": "#f5f6f8",
    "sheet": "#ffffff",
    "line": "#d3d8df",
    "text": "#1b2129",
    "quiet": "#525c69",
    "good": "#14602f",
    "good-back": "#dcf2e3",
    "warn": "#6e4700",
    "warn-back": "#fdeecb",
    "bad": "#9c1c1c",
    "bad-back": "#fce1e0",
    "own": "#1c4f93",
    "own-back": "#deebfb",
}
DARK: Final = {
    "page": "#12161b",
    "sheet": "#1b2128",
    "line": "#39424d",
    "text": "#e7ebf0",
    "quiet": "#a7b1be",
    "good": "#86dba2",
    "good-back": "#173723",
    "warn": "#f2c46d",
    "warn-back": "#3d2f10",
    "bad": "#ffaaa3",
    "bad-back": "#481d1d",
    "own": "#a5cbff",
    "own-back": "#1a3457",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE: Final = (
    f":root{{{_variables(LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
    """\
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:72rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.25rem 0}
h2{font-size:1.125rem;margin:0 0 .5rem;display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;
 overflow-wrap:anywhere}
code{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,monospace;font-size:.875em}
.summary{color:var(--quiet);margin:.25rem 0 1rem}
section{background:var(--sheet);border:1px solid var(--line);border-radius:8px;
 padding:1rem;margin:0 0 1rem}
.badge{display:inline-block;border-radius:999px;padding:0 .625rem;font-size:.875rem;
 font-weight:600;border:1px solid currentColor}
.good{color:var(--good);background:var(--good-back)}
.bad{color:var(--bad);background:var(--bad-back)}
.warn{color:var(--warn);background:var(--warn-back)}
.plain{color:var(--quiet);background:var(--page)}
.facts{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:0 0 .5rem;font-size:.875rem}
.facts div{display:flex;flex-wrap:wrap;gap:0 .5rem}
dt{color:var(--quiet)}
dd{margin:0;overflow-wrap:anywhere}
.note{color:var(--warn);background:var(--warn-back);border-left:4px solid var(--warn);
 padding:.5rem .75rem;margin:0 0 .75rem;overflow-wrap:anywhere}
ul.note{padding-left:2rem}
.board{list-style:none;display:grid;gap:.5rem;margin:0 0 .75rem;padding:.75rem;
 grid-template-columns:repeat(auto-fit,minmax(7.5rem,1fr));
 background:var(--page);border:2px solid var(--line);border-radius:6px}
.tile{border:1px solid currentColor;border-left-width:6px;border-radius:4px;padding:.5rem .625rem;
 display:flex;flex-direction:column;align-items:flex-start;min-height:4.5rem}
.tile.free{color:var(--good);background:var(--good-back)}
.tile.owned{color:var(--own);background:var(--own-back)}
.tile.busy{color:var(--warn);background:var(--warn-back)}
.tile.drained{color:var(--quiet);background:var(--sheet);border-style:dashed;
 border-left-style:solid}
.tile.kept{color:var(--warn);background:var(--sheet);border-style:dashed;
 border-left-style:solid}
.tile.failed{color:var(--bad);background:var(--bad-back)}
.what{font-weight:600;overflow-wrap:anywhere}
.find{max-width:72rem;margin:0 auto;padding:1rem 1rem 0;display:flex;flex-wrap:wrap;gap:.5rem;
 align-items:center;justify-content:flex-end;color:var(--quiet)}
.find input{min-width:0;flex:0 1 20rem}
.find input,.find button{font:inherit;color:var(--text);background:var(--sheet);
 border:1px solid var(--quiet);border-radius:4px;padding:.125rem .5rem}
a{color:inherit}
.tile .badge{margin-top:.25rem}
.why-drained{font-size:.875rem}
.legend div:target{outline:3px solid var(--own);outline-offset:2px}
small{color:var(--quiet);overflow-wrap:anywhere}
.who{overflow-wrap:anywhere;font-size:.9375rem}
.scroll{overflow-x:auto}
.scroll:focus-visible{outline:3px solid var(--own);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
caption{text-align:left;color:var(--quiet);padding-bottom:.25rem}
th,td{text-align:left;vertical-align:top;padding:.375rem .75rem .375rem 0;
 border-top:1px solid var(--line)}
thead th{color:var(--quiet);font-weight:600;border-top:0;white-space:nowrap}
tbody th{font-weight:400}
td code,th code{white-space:nowrap}
.pod{min-width:10rem}
.pod,.pod code{white-space:normal;overflow-wrap:anywhere}
.for{white-space:nowrap}
.why{min-width:18rem;overflow-wrap:anywhere}
.legend{display:grid;gap:.25rem 1.5rem;grid-template-columns:repeat(auto-fill,minmax(18rem,1fr));
 margin:0}
.legend div{display:grid;grid-template-columns:7rem 1fr}
.away{position:sticky;bottom:0;margin:0;padding:.75rem 1rem;color:var(--bad);
 background:var(--bad-back);border-top:1px solid currentColor}
@media (max-width:40rem){main{padding:.5rem}.find{padding:.5rem .5rem 0;justify-content:flex-start}
 section{padding:.75rem}
 .board{padding:.5rem}.tile{padding:.5rem .375rem}
 .legend div{grid-template-columns:1fr}
 table,caption,tbody,tbody tr{display:block}
 .pod,.why{min-width:0}
 thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
 tbody tr{border-top:1px solid var(--line);padding:.375rem 0}
 tbody th,td{display:grid;grid-template-columns:6rem minmax(0,1fr);gap:.5rem;border:0;
  padding:.0625rem 0;min-width:0;overflow-wrap:anywhere}
 tbody th::before,td::before{content:attr(data-head);color:var(--quiet)}
 td code,th code{white-space:normal}}
"""
)

SCRIPT: Final = """\
(() => {
  const main = document.getElementById("status"), away = document.getElementById("away");
  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.pathname + location.search, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = next.getElementById("status");
      if (fresh.innerHTML !== main.innerHTML) {
        const label = document.activeElement && document.activeElement.getAttribute("aria-label");
        const left = [...main.querySelectorAll(".scroll")].map(box => box.scrollLeft);
        main.replaceChildren(...fresh.childNodes);
        main.querySelectorAll(".scroll").forEach((box, i) => {
          box.scrollLeft = left[i] || 0;
          if (label && box.getAttribute("aria-label") === label) box.focus({preventScroll: true});
        });
      }
      away.hidden = true;
    } catch {
      away.hidden = false;
    }
  }
  setInterval(refresh, 5000);
  document.addEventListener("visibilitychange", refresh);
})();
"""
