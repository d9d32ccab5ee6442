// The page: figures on top, the views along the time axis, the panel beside them, then what has axes of its own.
stow.main = (() => {
  "use strict";

  const { element, scrolling } = stow.strip;
  const { button } = stow.panel;
  const { bytes: inWords, shown } = stow.text;
  const KEYS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

  let again = null; // draws the page that is shown once more

  function figure([label, size, meaning]) {
    const told = element("span", "", shown(meaning));
    told.title = shown(meaning);
    return element("div", "figure", element("small", "", label), element("b", "", size), told);
  }

  function header(data, chosen, choose) {
    const tabs = data.subjects.map((subject, index) =>
      button(shown(subject.name), () => choose(index), index === chosen ? "tab chosen" : "tab"));
    const { what } = data.subjects[chosen];
    const title = element("h1", "", shown(data.title), element("small", "", what === data.title ? "" : ` ${shown(what)}`));
    const top = element("div", "title", title, ...(tabs.length > 1 ? [element("nav", "", ...tabs)] : []));
    if (tabs.length > 1) tabs[chosen].setAttribute("aria-current", "true");
    const figures = element("div", "figures", ...data.subjects[chosen].figures.map(figure));
    figures.setAttribute("role", "group");
    figures.setAttribute("aria-label", "figures");
    return element("header", "", top, figures);
  }

  function notes(found) {
    const rows = found.map(([kind, where, what]) =>
      element("tr", "", ...[kind, where, what].map((cell) => element("td", "", shown(cell)))));
    const title = element("summary", "", `What the reader inferred or repaired (${found.length})`);
    const root = element("details", "view", title, scrolling("wide", "notes", element("table", "notes", ...rows)));
    root.id = "notes";
    return root;
  }

  function help() {
    return element(
      "p",
      "help",
      "Point at a step to see what is alive; click to stay there. Drag over steps to see them closer, double click for all, ",
      "ctrl and wheel to zoom. Arrow keys move the cursor, P goes to the peak, T changes between steps and time, Escape closes what is selected.",
    );
  }

  // Says where the cursor stays to those who do not see it.
  function announcer(state) {
    const said = element("output", "unseen");
    state.onChange((what) => {
      if (what !== "cursor" || state.cursor !== state.pinned) return;
      const { model, pinned } = state;
      said.textContent = `step ${pinned + 1} of ${model.steps}, ${inWords(model.raw.curve.total[pinned])} alive while running ${model.opName(model.opAt(pinned))}`;
    });
    return said;
  }

  function onKey(state, event) {
    if (event.target instanceof HTMLInputElement) return;
    if (event.key in KEYS) state.pin(state.pinned + KEYS[event.key]);
    else if (event.key === "p") state.pin(state.model.raw.curve.peak);
    else if (event.key === "t") state.measureBy(!state.timed);
    else if (event.key === "Escape") state.select(null);
    else return;
    event.preventDefault();
  }

  // The first picture and the panel at once; the rest one by one, each after what is there has been painted.
  function fill(views, below, state, { subjects, frontier }, chosen, choose) {
    const { raw, steps } = state.model;
    if (steps) views.append(stow.curve.mount(state).root);
    const later = [
      () => steps && views.append(stow.network.mount(state).root),
      () => steps && views.append(stow.lifetimes.mount(state).root),
      ...raw.arenas.map((arena) => () => steps && views.append(stow.arena.mount(state, arena).root)),
      () => steps && below.append(stow.modules.mount(state).root),
      () => steps && raw.tilings.length && below.append(stow.tiles.mount(state)),
      () => steps && raw.regions && below.append(stow.regions.mount(state)),
      () => subjects.length > 1 && below.append(stow.beside.mount(subjects, chosen, choose)),
      () => frontier && below.append(stow.frontier.mount(frontier)),
      () => raw.notes.length && below.append(notes(raw.notes)),
      () => steps && below.append(help()),
      () => performance.mark("drawn"),
    ];
    const next = () => {
      later.shift()();
      if (later.length) soon();
    };
    const soon = () => requestAnimationFrame(() => setTimeout(next));
    soon();
  }

  function show(root, data, chosen) {
    const state = new stow.state.State(new stow.model.Model(data.subjects[chosen], data.words));
    stow.shownState = state;
    again = () => show(root, data, chosen);
    const choose = (index) => show(root, data, index);
    const views = element("div", "views");
    const below = element("div", "below");
    root.replaceChildren(
      header(data, chosen, choose),
      element("div", "along", views, stow.panel.mount(state)),
      below,
      announcer(state),
    );
    fill(views, below, state, data, chosen, choose);
  }

  // The data is compressed JSON: a large step would otherwise be megabytes of text to read first.
  async function unpacked(text) {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  async function start() {
    const data = await unpacked(document.getElementById("data").textContent);
    show(document.getElementById("report"), data, 0);
    // Pictures have the colours of the time when they were drawn.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again());
    document.addEventListener("keydown", (event) => onKey(stow.shownState, event));
  }

  return { start };
})();

stow.main.start();
