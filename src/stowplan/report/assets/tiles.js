// Tiles: for one tile of a segment, the region at each level, what it needs beyond its own, and its work.
stow.tiles = (() => {
  "use strict";

  const { element, prepared, scrolling } = stow.strip;
  const { plain, of, hatch } = stow.palette;
  const { button } = stow.panel;
  const { count, shown, whole } = stow.text;
  const ROOM = 108; // pixels for the longer side of a tensor
  const PADDING = 8;
  const EXACT = 1e6; // from here on three digits are enough
  const FLATTEST = 0.25; // a short dim is stretched to this share of the other, or it could not be seen

  const wholeOf = (shape) => [shape.map(() => 0), shape];
  const corners = ([low, high]) => low.map((at, dim) => `[${at},${high[dim]})`).join("\u00d7");
  const sizes = ([low, high]) => low.map((at, dim) => high[dim] - at).join("\u00d7");
  // A rectangle in words: where it lies if that is short, else how large it is.
  const text = (rect) => (rect[0].length > 2 ? sizes(rect) : corners(rect));

  // Which two dims of a tensor are drawn: those that are cut, else the last; null stands for a dim of one.
  function dimsOf(shape, grid) {
    const all = shape.map((_, dim) => dim);
    const cut = shape.length === grid.length ? all.filter((dim) => grid[dim] > 1) : [];
    const rest = all.filter((dim) => !cut.includes(dim)).toReversed();
    const [one, other = null] = [...cut.slice(-2), ...rest].slice(0, 2);
    return other === null ? [null, one ?? null] : [Math.min(one, other), Math.max(one, other)];
  }

  const along = (rect, dim) => (dim === null ? [0, 1] : [rect[0][dim], rect[1][dim]]);

  // For each of the two dims from where on there is something to draw, on how many pixels, and those of a cell.
  function scalesOf(rect, shape, dims) {
    const spans = dims.map((dim) => {
      const [[low, high], [, size]] = [along(rect, dim), along(wholeOf(shape), dim)];
      return { low: Math.min(0, low), length: Math.max(size, high) - Math.min(0, low) };
    });
    const longest = Math.max(...spans.map(({ length }) => length));
    return spans.map(({ low, length }) => {
      const drawn = ROOM * Math.max(FLATTEST, length / longest);
      return { low, drawn, cell: drawn / Math.max(1, length) };
    });
  }

  // From a box in cells to one in pixels.
  function placing(scales, dims) {
    return (rect) => {
      const [[y, height], [x, width]] = dims.map((dim, index) => {
        const [low, high] = along(rect, dim);
        const { low: origin, cell } = scales[index];
        return [PADDING + (low - origin) * cell, (high - low) * cell];
      });
      return [x, y, width, height];
    };
  }

  // A canvas for a rectangle of a tensor, and from boxes to places on it.
  function sheet(canvas, rect, shape, grid) {
    const dims = dimsOf(shape, grid);
    const scales = scalesOf(rect, shape, dims);
    const [height, width] = scales.map(({ drawn }) => Math.ceil(drawn) + 2 * PADDING);
    return { context: prepared(canvas, width, height), box: placing(scales, dims), scales };
  }

  function drawGrid(context, [x, y, width, height], [row, column]) {
    context.strokeStyle = plain("grid");
    if (Math.min(row.cell, column.cell) > 3) {
      for (let at = 0; at <= height + 0.5; at += row.cell) context.strokeRect(x, y + at, width, 0);
      for (let at = 0; at <= width + 0.5; at += column.cell) context.strokeRect(x + at, y, 0, height);
    }
    context.strokeStyle = plain("faint");
    context.strokeRect(x, y, width, height);
  }

  // What a level reads: its own cell, the halo around it, and padding where the wish reaches past the border.
  function drawRead(canvas, read, grid) {
    const { context, box, scales } = sheet(canvas, read.wanted, read.shape, grid);
    const everything = box(wholeOf(read.shape));
    context.fillStyle = of("padding");
    context.fillRect(...box(read.wanted));
    context.fillStyle = plain("page");
    context.fillRect(...everything);
    context.fillStyle = of(read.owned ? "halo" : "owned");
    context.fillRect(...box(read.inside));
    if (read.owned) drawOwned(context, box(read.inside), box(read.owned));
    drawGrid(context, everything, scales);
    context.strokeStyle = plain("ink");
    context.strokeRect(...box(read.wanted));
  }

  // The tile's own cell, full where it is read and hatched where it is not.
  function drawOwned(context, inside, owned) {
    context.save();
    context.beginPath();
    context.rect(...inside);
    context.clip();
    context.fillStyle = of("owned");
    context.fillRect(...owned);
    context.restore();
    hatch(context, ...owned);
  }

  function drawMade(canvas, level, grid) {
    const { context, box, scales } = sheet(canvas, level.made, level.made_shape, grid);
    context.fillStyle = of("made");
    context.fillRect(...box(level.made));
    drawGrid(context, box(wholeOf(level.made_shape)), scales);
    context.strokeStyle = plain("ink");
    context.strokeRect(...box(level.made));
  }

  // A picture with what it shows and a further word; pointing at it says where the rectangle lies.
  function picture(draw, verb, rect, more) {
    const canvas = element("canvas");
    draw(canvas);
    const caption = element("figcaption", "", `${verb} ${text(rect)}`, element("br"), more);
    caption.title = `${verb} ${corners(rect)}`;
    return element("figure", "", canvas, caption);
  }

  // One op of the tile: what it reads on the left, what it makes of it on the right.
  function levelBox(state, level, grid) {
    const halo = level.halo ? `${whole(level.halo)} cells of halo` : "no halo";
    const macs = level.macs ? `${count(level.macs)} MACs` : "";
    const here = level.op === state.model.raw.ops.id[state.model.opAt(state.cursor)];
    const reads = level.reads.map((read, index) =>
      picture((canvas) => drawRead(canvas, read, grid), "reads", read.wanted, index ? "" : halo));
    return element(
      "div",
      here ? "level here" : "level",
      element("h3", "", shown(level.op)),
      ...reads,
      picture((canvas) => drawMade(canvas, level, grid), "makes", level.made, macs),
    );
  }

  // A cell for each tile: the last dim that is cut goes to the right, the others downwards.
  function picker(tiling, chosen, choose) {
    const cut = tiling.grid.flatMap((parts, dim) => (parts > 1 ? [dim] : []));
    const grid = element("div", "picker");
    grid.style.gridTemplateColumns = `repeat(${tiling.grid[cut.at(-1)] ?? 1}, 26px)`;
    tiling.tiles.forEach((tile, index) => {
      const name = cut.map((dim) => tile.at[dim]).join(",");
      const cell = button(name, () => choose(index), index === chosen ? "tile chosen" : "tile");
      cell.addEventListener("pointerenter", () => choose(index));
      grid.append(cell);
    });
    return grid;
  }

  function cost(tiling, tile) {
    const macs = tile.forward.reduce((sum, level) => sum + (level.macs ?? 0), 0);
    return element("p", "", `This tile: ${macs < EXACT ? whole(macs) : count(macs)} forward MACs. ${tiling.cost}`);
  }

  const KEYS = [["owned", "its own cell"], ["halo", "halo"], ["padding", "padding"], ["made", "what it makes"]];

  function legend() {
    const keys = KEYS.map(([colour, name]) => {
      const chip = element("i", "chip");
      chip.style.background = of(colour);
      return element("span", "key", chip, name);
    });
    return element("div", "legend", ...keys);
  }

  const tabs = (names, chosen, choose) =>
    names.map((name, index) => button(shown(name), () => choose(index), index === chosen ? "tab chosen" : "tab"));

  const HALVES = ["forward", "backward"];

  class Tiles {
    #chosen = { tiling: 0, tile: 0, half: 0 };

    constructor(state) {
      this.state = state;
      this.root = element("section", "view");
      this.root.id = "tiles";
      state.onChange((what) => what === "cursor" && this.#follow());
      this.#paint();
    }

    // The sweep under the cursor is the one to look at; of a schedule, the level under the cursor is marked.
    #follow() {
      const { model, cursor } = this.state;
      const under = model.raw.tilings.findIndex(({ sweeps }) => sweeps.includes(model.opAt(cursor)));
      if (under >= 0) this.#choose({ tiling: under, tile: 0 });
      else if (!model.raw.tilings[this.#chosen.tiling].sweeps.length) this.#paint();
    }

    #choose(change) {
      const next = { ...this.#chosen, ...change };
      const known = this.#chosen;
      if (next.tiling === known.tiling && (change.tile === undefined || next.tile === known.tile) && next.half === known.half) return;
      this.#chosen = next;
      this.#paint();
    }

    #heading(tiling, tile) {
      const { tilings } = this.state.model.raw;
      const halves = HALVES.filter((half) => tile[half].length);
      const names = tilings.map(({ name }) => name);
      return element(
        "div",
        "heading",
        element("h2", "", `Tile ${tile.at.join(",")} of ${tiling.grid.join("\u00d7")}, level by level`),
        ...(tilings.length > 1 ? tabs(names, this.#chosen.tiling, (index) => this.#choose({ tiling: index, tile: 0 })) : []),
        ...(halves.length > 1 ? tabs(halves, this.#chosen.half, (index) => this.#choose({ half: index })) : []),
        legend(),
      );
    }

    #paint() {
      const tiling = this.state.model.raw.tilings[this.#chosen.tiling];
      const tile = tiling.tiles[this.#chosen.tile];
      const half = HALVES.filter((name) => tile[name].length)[this.#chosen.half] ?? "forward";
      const levels = tile[half].map((level) => levelBox(this.state, level, tiling.grid));
      this.root.replaceChildren(
        this.#heading(tiling, tile),
        element("div", "tiling", picker(tiling, this.#chosen.tile, (tile_) => this.#choose({ tile: tile_ })), scrolling("levels", "levels of the tile", ...levels)),
        cost(tiling, tile),
      );
    }
  }

  return { mount: (state) => new Tiles(state).root };
})();
