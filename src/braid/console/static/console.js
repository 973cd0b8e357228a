// What the console's pages do in the browser: hints, zoom of the braid, clicks on rows, keys, the theme.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const tell = (name, detail) => window.emitEvent && window.emitEvent(name, detail);

  // Hints, and the strand under the pointer.
  const tip = document.createElement("div");
  tip.id = "tip";
  let pointer = null;
  const point = () => {
    if (!pointer) return;
    const target = document.elementFromPoint(pointer.x, pointer.y);
    const svg = $("svg.braid"), shape = target && target.closest("[data-tip]");
    if (svg) {
      const at = target && target.closest("svg.braid [data-segment]");
      svg.classList.toggle("pointing", !!at);
      for (const each of svg.querySelectorAll(".lit")) each.classList.remove("lit");
      if (at) for (const each of svg.querySelectorAll(`[data-segment="${at.dataset.segment}"]`)) each.classList.add("lit");
    }
    if (!shape) return tip.classList.remove("on");
    const [title, ...rest] = shape.dataset.tip.split("|");
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }));
    for (const line of rest) tip.append(Object.assign(document.createElement("div"), { textContent: line }));
    const left = Math.min(pointer.x + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = pointer.y + 16 + tip.offsetHeight > window.innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? pointer.y - tip.offsetHeight - 12 : pointer.y + 16}px`;
    tip.classList.add("on");
  };
  document.addEventListener("pointermove", (event) => { pointer = { x: event.clientX, y: event.clientY }; point(); }, { passive: true });
  // The drawing is written anew every second: what is under the pointer stays lit.
  let asked = false;
  const later = (changes) => {
    if (asked || !changes.some((each) => each.target !== tip && !tip.contains(each.target))) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; point(); refocus(); });
  };

  // The server writes a card anew when it changes: what had the focus of the keyboard keeps it.
  let focused = null;
  const acts = (element) => JSON.stringify({ ...element.dataset });
  const refocus = () => {
    if (!focused || focused.isConnected || document.activeElement !== document.body) return;
    const same = [...document.querySelectorAll("[data-act]")].find((each) => acts(each) === acts(focused));
    if (same) same.focus({ preventScroll: true });
  };
  document.addEventListener("focusin", (event) => { focused = event.target.closest("[data-act]"); });
  document.addEventListener("pointerdown", () => { focused = null; });

  // Zoom and drag. The server computes the drawing, so it stays sharp.
  const place = (event) => {
    const svg = event.target.closest && event.target.closest("svg.braid");
    if (!svg) return null;
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    return { svg, scale, x: (event.clientX - box.left) * scale - +svg.dataset.left, y: (event.clientY - box.top) * scale - +svg.dataset.top };
  };
  let pending = null;
  const send = (detail) => {
    if (pending) { if (detail.kind === pending.kind && detail.kind === "zoom") pending.factor *= detail.factor; else if (detail.kind === "pan") { pending.dx += detail.dx; pending.dy += detail.dy; } return; }
    pending = detail;
    setTimeout(() => { tell("braid", pending); pending = null; }, 60);
  };
  document.addEventListener("wheel", (event) => {
    const at = place(event);
    if (!at || !(event.ctrlKey || event.metaKey || event.altKey || event.shiftKey)) return;
    event.preventDefault();
    const delta = event.deltaY || event.deltaX;
    send({ kind: "zoom", factor: Math.exp(delta * 0.0016), x: at.x, y: at.y, ring: !event.shiftKey });
  }, { passive: false });
  document.addEventListener("dblclick", (event) => { const at = place(event); if (at) send({ kind: "zoom", factor: 0.5, x: at.x, y: at.y, ring: true }); });
  let drag = null;
  document.addEventListener("pointerdown", (event) => { const at = place(event); if (at && event.button === 0) drag = { x: event.clientX, y: event.clientY, scale: at.scale }; });
  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = (event.clientX - drag.x) * drag.scale, dy = (event.clientY - drag.y) * drag.scale;
    if (Math.abs(dx) + Math.abs(dy) < 3) return;
    drag.x = event.clientX; drag.y = event.clientY;
    send({ kind: "pan", dx, dy });
  });
  document.addEventListener("pointerup", () => { drag = null; });

  // Buttons of rows that the server writes as plain HTML.
  document.addEventListener("click", (event) => {
    const copy = event.target.closest && event.target.closest("[data-copy]");
    if (copy) {
      event.preventDefault(); event.stopPropagation();
      const say = (text) => { copy.textContent = text; setTimeout(() => { copy.textContent = "Copy"; }, 2500); };
      // Browsers have no navigator.clipboard on a page that comes by plain HTTP from another machine.
      const selected = () => {
        window.getSelection().selectAllChildren($("pre", copy.closest(".whole")));
        say(document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C");
      };
      if (navigator.clipboard) navigator.clipboard.writeText(copy.dataset.copy).then(() => say("Copied"), selected);
      else selected();
      return;
    }
    const button = event.target.closest && event.target.closest("[data-act]");
    if (button && !button.disabled) { event.preventDefault(); tell("act", { ...button.dataset }); }
  });

  // Keys: g and a letter goes to a page.
  const PAGES = { c: "/", t: "/topics", m: "/messages", s: "/subscriptions", p: "/pipeline" };
  let going = 0;
  document.addEventListener("keydown", (event) => {
    // Enter in a field of a dialog is its button. A list opens by Enter, and a text of several lines gets another one.
    if (event.key === "Enter" && !event.repeat && event.target.matches(".dialog input:not([role=combobox])")) {
      const go = [...event.target.closest(".dialog").querySelectorAll(".buttons button:not(.quiet):not(:disabled)")].pop();
      if (go && go.offsetParent) go.click();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName) || event.target.isContentEditable) return;
    const row = (event.key === "Enter" || event.key === " ") && event.target.closest("[data-act][tabindex]");
    if (row) { event.preventDefault(); if (!event.repeat) tell("act", { ...row.dataset }); return; }
    if (event.key === "g") { going = Date.now(); return; }
    if (Date.now() - going < 1500 && PAGES[event.key]) { going = 0; location.assign(PAGES[event.key]); return; }
    if (event.key === "/") { const field = $(".search input"); if (field) { event.preventDefault(); field.focus(); } }
    else if (event.key === "d") window.braidTheme();
    else if (event.key === "?") tell("keys", {});
    else if (event.key === "+" || event.key === "=") tell("braid", { kind: "zoom", factor: 0.7 });
    else if (event.key === "-") tell("braid", { kind: "zoom", factor: 1.4 });
    else if (event.key === "0") tell("braid", { kind: "reset" });
  });

  window.braidTheme = () => {
    const dark = !document.body.classList.contains("body--dark");
    document.cookie = `braid-theme=${dark ? "dark" : "light"}; path=/; max-age=31536000; samesite=strict`;
    tell("theme", { dark });
  };
  document.addEventListener("DOMContentLoaded", () => {
    document.body.append(tip);
    new MutationObserver(later).observe(document.body, { childList: true, subtree: true });
  });
})();
