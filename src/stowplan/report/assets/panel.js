// The panel: what is alive at the step under the cursor and why, and all about what is selected.
stow.panel = (() => {
  "use strict";

  const { element } = stow.strip;
  const { of } = stow.palette;
  const { bytes, count, percent, shown, whole } = stow.text;
  const LISTED = 40;
  const LINKS = 12;

  const button = (label, act, classes = "link") => {
    const made = element("button", classes, label);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  };

  const stepLink = (state, step) => button(`step ${whole(step + 1)}`, () => state.pin(step));
  const tensorLink = (state, tensor) =>
    button(state.model.tensorName(tensor), () => state.select({ tensor: state.model.owner(tensor) }));
  const opLink = (state, op) => button(state.model.opName(op), () => state.select({ op }));

  // An op at a step: who, and when.
  const runLink = (state, step) =>
    element("span", "run", opLink(state, state.model.opAt(step)), " at ", stepLink(state, step));

  // The first few of many, and how many more there are.
  function several(items, link) {
    const nodes = items.slice(0, LINKS).map((item) => element("li", "", link(item)));
    if (items.length > LINKS) nodes.push(element("li", "", `and ${whole(items.length - LINKS)} more`));
    return element("ul", "links", ...nodes);
  }

  function facts(pairs) {
    const told = pairs.filter(([, ...values]) => values.length);
    return element("dl", "", ...told.flatMap(([term, ...values]) => [
      element("dt", "", term),
      element("dd", "", ...values),
    ]));
  }

  const listed = (items, link) => (items.length ? [several(items, link)] : []);

  function tensorCard(state, tensor) {
    const { model } = state;
    const { tensors, stays } = model.raw;
    const copies = model.staysOf[tensor].toSorted((a, b) => model.first[a] - model.first[b]);
    const made = copies.filter((stay) => stays.made[stay]);
    const uses = copies.flatMap((stay) => stays.uses[stay]).filter((step) => model.doing(step) !== "store");
    const begun = (stay) => runLink(state, model.first[stay]);
    const gradients = tensors.gradient_of.flatMap((of_, index) => (of_ === tensor ? [index] : []));
    const size = tensors.bytes[tensor] === null ? "" : `, ${bytes(tensors.bytes[tensor])}`;
    return [
      element("p", "what", `${model.kind(tensor)}, ${tensors.shape[tensor]}${size}`),
      facts([
        ["decided", ...(tensors.decision[tensor] ? [decision(tensors, tensor)] : [])],
        ["made by", ...listed(made.slice(0, 1), begun)],
        ["recomputed", ...listed(made.slice(1).filter((stay) => model.madeBy(stay) !== "load"), begun)],
        ["stored", ...listed(model.awayOf(tensor), (away) => stepLink(state, model.raw.away.first[away]))],
        ["loaded", ...listed(made.filter((stay) => model.madeBy(stay) === "load"), begun)],
        ["read by", ...listed(uses, (step) => runLink(state, step))],
        ["in memory", ...listed(copies, (stay) => span(state, stay))],
        ["held", ...(model.held.has(tensor) ? ["by the caller when the step ends"] : [])],
        ["views", ...listed(model.viewsOf(tensor), (view) => model.tensorName(view))],
        ["gradient", ...listed(gradients, (gradient) => tensorLink(state, gradient))],
        ["gradient of", ...(tensors.gradient_of[tensor] >= 0 ? [tensorLink(state, tensors.gradient_of[tensor])] : [])],
      ]),
    ];
  }

  function decision(tensors, tensor) {
    const word = element("b", "decision", tensors.decision[tensor]);
    word.style.background = of(tensors.decision[tensor]);
    return element("span", "", word, " ", tensors.reason[tensor]);
  }

  const span = (state, stay) =>
    element("span", "run", stepLink(state, state.model.first[stay]), " to ", stepLink(state, state.model.last[stay]));

  function opCard(state, op) {
    const { model } = state;
    const { ops } = model.raw;
    const runs = model.runsOf[op];
    return [
      element("p", "what", [shown(ops.type[op]), model.phase(op)].join(", ")),
      facts([
        ["module", ...(ops.scope[op] ? [shown(ops.scope[op])] : [])],
        ["source", ...(ops.source[op] ? [shown(ops.source[op])] : [])],
        ["takes", ...(model.time(op) ? [model.time(op)] : [])],
        ["work", ...(ops.macs[op] ? [`${count(ops.macs[op])} MACs`] : [])],
        ["runs at", ...listed(runs, (step) => runNote(state, step))],
        ["reads", ...listed(inputs(model, op), ([tensor, role]) => roleNote(state, tensor, role))],
        ["makes", ...listed(ops.outputs[op], (tensor) => outputNote(state, tensor))],
      ]),
    ];
  }

  function inputs(model, op) {
    const roles = model.raw.ops.input_roles[op];
    return model.raw.ops.inputs[op].map((tensor, index) => [tensor, model.words.roles[roles[index]]]);
  }

  const runNote = (state, step) => {
    const doing = state.model.doing(step);
    return element("span", "run", stepLink(state, step), doing === "compute" ? "" : `, ${doing}`);
  };

  const roleNote = (state, tensor, role) =>
    element("span", "run", tensorLink(state, tensor), role === "data" ? "" : `, ${role}`);

  function outputNote(state, tensor) {
    const { decision: decided } = state.model.raw.tensors;
    const word = decided[state.model.owner(tensor)];
    return element("span", "run", tensorLink(state, tensor), word ? `, ${word}` : "");
  }

  function card(state) {
    const { model, selected } = state;
    if (!selected) return [];
    const isOp = selected.op !== undefined;
    const name = isOp ? model.opName(selected.op) : model.tensorName(selected.tensor);
    const close = button("\u00d7", () => state.select(null), "close");
    close.setAttribute("aria-label", "close");
    const body = isOp ? opCard(state, selected.op) : tensorCard(state, selected.tensor);
    return [element("div", "card", close, element("h3", "", name), ...body)];
  }

  function head(state) {
    const { model, cursor } = state;
    const { curve } = model.raw;
    const op = model.opAt(cursor);
    const where = `step ${whole(cursor + 1)} of ${whole(model.steps)}`;
    const peak = cursor === curve.peak ? ", the peak" : "";
    const more = [shown(model.raw.ops.scope[op]), model.time(op), macs(model, op)].filter(Boolean);
    return element(
      "div",
      "now",
      element("p", "where", `${where}${peak}`, button("to the peak", () => state.pin(curve.peak), "link end")),
      element("p", "alive-now", element("b", "", bytes(curve.total[cursor])), " alive while running ", opLink(state, op)),
      element("p", "more", more.join(" \u00b7 ")),
      kindsBar(model, cursor),
    );
  }

  const macs = (model, op) => (model.raw.ops.macs[op] ? `${count(model.raw.ops.macs[op])} MACs` : "");

  // How the bytes alive divide among the kinds.
  function kindsBar(model, step) {
    const { curve } = model.raw;
    const bar = element("div", "kinds");
    curve.kinds.forEach((kind, index) => {
      const share = curve.bytes[index][step] / (curve.total[step] || 1);
      if (share <= 0) return;
      const part = element("i");
      part.style.flexGrow = share;
      part.style.background = of(model.words.kinds[kind]);
      part.title = `${model.words.kinds[kind]}: ${bytes(curve.bytes[index][step])}, ${percent(share)}`;
      bar.append(part);
    });
    return bar;
  }

  function row(state, stay, total) {
    const { model, cursor } = state;
    const tensor = model.raw.stays.tensor[stay];
    const bar = element("i", "share");
    bar.style.width = `${(100 * model.bytes[stay]) / total}%`;
    bar.style.background = of(model.group(tensor));
    const shape = element("small", "", ` ${model.raw.tensors.shape[tensor]}`);
    const name = element("span", "name", model.tensorName(tensor), shape);
    const size = element("span", "size", bytes(model.bytes[stay]));
    const why = element("span", "why", model.why(stay, cursor));
    const made = button("", () => state.select({ tensor }), "row");
    made.append(bar, name, size, why);
    made.title = `${model.tensorName(tensor)}, ${model.kind(tensor)}: ${model.why(stay, cursor)}`;
    return element("li", "", made);
  }

  function sumRow(name, why, size) {
    const cells = [element("span", "name", name), element("span", "size", bytes(size)), element("span", "why", why)];
    return element("li", "", element("div", "row sum", ...cells));
  }

  // What an op takes aside, and why: a sweep takes it for the largest of its tiles.
  function asideWords(model, step) {
    if (!model.isSweep(model.opAt(step))) return ["workspace", "taken aside by this op while it runs"];
    return ["inside a tile", "the most that a tile of this sweep takes while it runs"];
  }

  // Parameters and buffers as one row: that they are there explains nothing.
  function list(state) {
    const { model, cursor } = state;
    const { stays, others, standing } = model.alive(cursor, LISTED);
    const largest = (stays.length && model.bytes[stays[0]]) || 1;
    const sums = [];
    if (standing.count) {
      const some = standing.count === 1 ? "1 parameter or buffer" : `${whole(standing.count)} parameters and buffers`;
      sums.push(sumRow(some, "always there", standing.bytes));
    }
    const aside = model.raw.runs.aside[cursor];
    if (aside) sums.push(sumRow(...asideWords(model, cursor), aside));
    const rows = stays.map((stay) => row(state, stay, largest));
    if (others.count) rows.push(sumRow(`${whole(others.count)} smaller tensors`, "their lifetimes say why", others.bytes));
    return element("ol", "alive", ...sums, ...rows);
  }

  function mount(state) {
    const root = element("aside", "panel");
    root.id = "panel";
    root.setAttribute("aria-label", "what is alive at this step");
    const paint = () => {
      if (!state.model.steps) root.replaceChildren(element("p", "", "Nothing runs in this graph."));
      else root.replaceChildren(head(state), ...card(state), list(state));
    };
    state.onChange((what) => {
      if (what !== "range") paint();
      if (what === "selected") root.scrollTop = 0;
    });
    paint();
    return root;
  }

  return { mount, button };
})();
