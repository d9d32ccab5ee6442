// Regions: of the op under the cursor, which part of each tensor this worker reads and writes, dim by dim.
stow.regions = (() => {
  "use strict";

  const { element, scrolling } = stow.strip;
  const { of } = stow.palette;
  const { shown, whole } = stow.text;

  const percent = (share) => `${100 * share}%`;

  // One dim as a line as long as the tensor, with the part that is used.
  function dimBar(size, low, high, colour) {
    const [from, to] = [Math.min(0, low), Math.max(size, high)];
    const length = Math.max(1, to - from);
    const part = element("i");
    part.style.left = percent((low - from) / length);
    part.style.width = percent(Math.max(0, high - low) / length);
    part.style.background = colour;
    const bar = element("span", "dim", part);
    bar.title = `${whole(low)} to ${whole(high)} of ${whole(size)}`;
    return element("span", "dimension", bar, `${low}\u2013${high}`, element("small", "", ` of ${size}`));
  }

  function rectBars(rect, shape, colour) {
    if (!rect) return element("span", "none", "never");
    const [low, high] = rect;
    return element("span", "dims", ...low.map((at, dim) => dimBar(shape?.[dim] ?? high[dim], at, high[dim], colour)));
  }

  function tensorRow(model, tensor, use) {
    const region = model.raw.regions.tensors[tensor];
    const cells = [
      element("th", "", model.tensorName(tensor), element("small", "", ` ${use}`)),
      element("td", "", rectBars(region?.read, region?.shape, of("read"))),
      element("td", "", rectBars(region?.write, region?.shape, of("made"))),
    ];
    return element("tr", "", ...cells);
  }

  function portRow([port, rect]) {
    const cell = element("td", "", rectBars(rect, null, of("halo")));
    cell.colSpan = 2;
    return element("tr", "", element("th", "", shown(port), element("small", "", " port")), cell);
  }

  function table(model, op) {
    const { ops, regions } = model.raw;
    const rows = [
      ...ops.inputs[op].map((tensor) => tensorRow(model, tensor, "in")),
      ...ops.outputs[op].map((tensor) => tensorRow(model, tensor, "out")),
      ...regions.ops[op].map(portRow),
    ];
    const header = ["tensor", "this worker reads", "this worker writes"].map((name) => element("th", "", name));
    return element("table", "regions", element("thead", "", element("tr", "", ...header)), element("tbody", "", ...rows));
  }

  function mount(state) {
    const root = element("section", "view");
    root.id = "regions";
    const paint = () => {
      const op = state.model.opAt(state.cursor);
      const title = `Which rectangles ${state.model.opName(op)} uses`;
      root.replaceChildren(element("div", "heading", element("h2", "", title)), scrolling("wide", title, table(state.model, op)));
    };
    state.onChange((what) => what === "cursor" && paint());
    paint();
    return root;
  }

  return { mount };
})();
