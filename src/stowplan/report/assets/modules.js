// Which modules hold the memory: the bytes alive at the pinned step by the path of modules, one row of boxes for each part of
// the path. A box is a button: a module's brings it closer, a tensor's selects it.
stow.modules = (() => {
  "use strict";

  const { element } = stow.strip;
  const { button } = stow.panel;
  const { of } = stow.palette;
  const { bytes, percent, shown, whole } = stow.text;
  const DEEP = 4; // rows below the module that is shown
  const LEAST = 0.004; // of its bytes: smaller parts share a box

  const OWN_FORWARD = /^\w+\.forward$/; // the code of the whole model, not of a module in it

  const parentOf = (path) => path.split(".").slice(0, -1).join(".");

  // The path of the module that a tensor belongs to: a gradient to its tensor's, a parameter to its owner.
  function pathOf(model, tensor) {
    const { id, name, module, gradient_of: gradientOf } = model.raw.tensors;
    if (gradientOf[tensor] >= 0 && gradientOf[tensor] !== tensor) return pathOf(model, gradientOf[tensor]);
    if (module[tensor]) return module[tensor].replace(OWN_FORWARD, "");
    if (["parameter", "buffer"].includes(model.kind(tensor))) return parentOf(name[tensor] || id[tensor]);
    const maker = model.maker(tensor);
    return maker === null ? "" : model.raw.ops.scope[maker];
  }

  const node = (name, tensor = null) => ({ name, tensor, bytes: 0, kinds: new Map(), parts: new Map() });

  function add(root, path, leaf, size, kind) {
    let at = root;
    for (const part of [null, ...path, leaf]) {
      if (part === leaf) at = at.parts.get(leaf.name) ?? at.parts.set(leaf.name, node(leaf.name, leaf.tensor)).get(leaf.name);
      else if (part !== null) at = at.parts.get(part) ?? at.parts.set(part, node(part)).get(part);
      at.bytes += size;
      at.kinds.set(kind, (at.kinds.get(kind) ?? 0) + size);
    }
  }

  // All bytes alive at a step. `together` takes numbered modules, as of repeated blocks, for one.
  function treeAt(model, step, together) {
    const root = node("the step");
    const parts = (path) => path.split(".").filter(Boolean).map((part) => (together && /^\d+$/.test(part) ? "0.." : part));
    for (let stay = 0; stay < model.first.length; stay += 1) {
      if (model.first[stay] > step || step > model.last[stay]) continue;
      const tensor = model.raw.stays.tensor[stay];
      const leaf = { name: `\n${together ? model.kind(tensor) : tensor}`, tensor: together ? null : tensor };
      add(root, parts(pathOf(model, tensor)), leaf, model.bytes[stay], model.kind(tensor));
    }
    const aside = model.raw.runs.aside[step];
    const scope = model.raw.ops.scope[model.opAt(step)];
    if (aside) add(root, parts(scope), { name: "\nworkspace", tensor: null }, aside, "workspace");
    return root;
  }

  // A leaf's name begins with a line feed, so that no module has the same.
  function labelOf(model, part) {
    if (part.tensor !== null) return model.tensorName(part.tensor);
    return shown(part.name.replace("\n", ""));
  }

  // Numbered modules in the order of their numbers, the others by size.
  const inOrder = (one, other) => (isNumber(one) && isNumber(other) ? one.name - other.name : other.bytes - one.bytes);
  const isNumber = ({ name }) => /^\d+$/.test(name);

  function band(part) {
    const made = element("span", "kinds");
    for (const [kind, size] of part.kinds) {
      const piece = element("i");
      piece.style.flexGrow = size;
      piece.style.background = of(kind);
      made.append(piece);
    }
    return made;
  }

  class Modules {
    #path = [];
    #together = false;
    #step = -1;

    constructor(state) {
      this.state = state;
      this.title = element("h2", "", "");
      this.crumbs = element("nav", "crumbs");
      this.crumbs.setAttribute("aria-label", "module that is shown");
      this.body = element("div", "modules");
      const fold = button("numbered modules together", () => this.#fold(fold), "key");
      fold.setAttribute("aria-pressed", "false");
      this.root = element("section", "view", element("div", "heading", this.title, this.crumbs, fold), this.body);
      this.root.id = "modules";
      state.onChange((what) => what === "cursor" && state.pinned !== this.#step && this.paint());
      this.paint();
    }

    #fold(key) {
      this.#together = !this.#together;
      this.#path = [];
      key.setAttribute("aria-pressed", String(this.#together));
      this.paint();
    }

    #go(path) {
      this.#path = path;
      this.paint();
      this.crumbs.lastElementChild.focus();
    }

    // The module that is shown; from the top if it holds nothing at this step.
    #found(root) {
      const found = this.#path.reduce((at, part) => at?.parts.get(part), root);
      if (!found) this.#path = [];
      return found ?? root;
    }

    paint() {
      const { model, pinned } = this.state;
      this.#step = pinned;
      this.tree = treeAt(model, pinned, this.#together);
      const found = this.#found(this.tree);
      const when = pinned === model.raw.curve.peak ? "the peak" : `step ${whole(pinned + 1)}`;
      this.title.textContent = `Which modules hold the memory at ${when}`;
      const crumbs = [[], ...this.#path.map((_, index) => this.#path.slice(0, index + 1))];
      this.crumbs.replaceChildren(...crumbs.map((path) => button(shown(path.at(-1) ?? "all"), () => this.#go(path))));
      this.body.replaceChildren(this.#parts(found, this.#path, DEEP, found.bytes));
    }

    #parts(part, path, deep, all) {
      const sorted = [...part.parts.values()].toSorted((a, b) => b.bytes - a.bytes);
      const large = sorted.filter((each) => each.bytes >= LEAST * all);
      const boxes = large.toSorted(inOrder).map((each) => this.#box(each, [...path, each.name], deep - 1, all));
      const rest = sorted.slice(large.length).reduce((sum, each) => sum + each.bytes, 0);
      if (rest >= LEAST * all) boxes.push(this.#rest(sorted.length - large.length, rest));
      return element("div", "parts", ...boxes);
    }

    #rest(count, size) {
      const made = element("div", "part", element("span", "box", `${whole(count)} smaller`));
      made.style.flexGrow = size;
      made.title = `${whole(count)} smaller parts, ${bytes(size)}`;
      return made;
    }

    #box(part, path, deep, all) {
      const label = labelOf(this.state.model, part);
      const words = `${label}, ${bytes(part.bytes)}, ${percent(part.bytes / all)}`;
      const inner = [element("b", "", label), element("span", "", bytes(part.bytes)), band(part)];
      const leads = part.tensor !== null || part.parts.size > 0;
      const act = () => (part.tensor !== null ? this.state.select({ tensor: part.tensor }) : this.#go(path));
      const box = leads ? button("", act, "box") : element("span", "box");
      box.append(...inner);
      box.title = words;
      const made = element("div", "part", box);
      made.style.flexGrow = part.bytes;
      if (part.parts.size && deep > 0) made.append(this.#parts(part, path, deep, all));
      return made;
    }
  }

  const mount = (state) => new Modules(state);

  return { mount };
})();
