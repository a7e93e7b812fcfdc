(() => {
  const main = document.getElementById("status"), away = document.getElementById("away");
  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.pathname + location.search, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.title = next.title;
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
