(() => {
  const main = document.getElementById("status"), away = document.getElementById("away");
  const focusable = () => [...main.querySelectorAll("a,summary,[tabindex]")];
  const name = one => [one.closest("[id]").id, one.tagName, one.getAttribute("aria-label"),
    one.getAttribute("href")].join();
  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.pathname + location.search, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.title = next.title;
      const fresh = next.getElementById("status");
      const open = new Set([...main.querySelectorAll("details[open]")].map(one => one.id));
      fresh.querySelectorAll("details").forEach(one => { one.open = open.has(one.id); });
      if (fresh.innerHTML !== main.innerHTML) {
        const active = main.contains(document.activeElement) ? name(document.activeElement) : "";
        const same = () => focusable().filter(one => name(one) === active);
        const nth = same().indexOf(document.activeElement);
        const left = [...main.querySelectorAll(".scroll")].map(box => box.scrollLeft);
        main.replaceChildren(...fresh.childNodes);
        main.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = left[i] || 0; });
        same()[nth]?.focus({preventScroll: true});
      }
      away.hidden = true;
    } catch {
      away.hidden = false;
    }
  }
  setInterval(refresh, 5000);
  document.addEventListener("visibilitychange", refresh);
  let shut = [];
  addEventListener("beforeprint", () => {
    shut = [...main.querySelectorAll("details:not([open])")];
    shut.forEach(one => { one.open = true; });
  });
  addEventListener("afterprint", () => shut.forEach(one => { one.open = false; }));
})();
