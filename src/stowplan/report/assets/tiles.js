// Tiles: for one tile of a segment, the region at each level, what it needs beyond its own, and its work.
stow.tiles = (() => {
  "use strict";

  const { element, prepared } = stow.strip;
  const { plain, of, hatch } = stow.palette;
  const { button } = stow.panel;
  const { count, whole } = stow.text;
  const SIDE = 140;
  const PADDING = 14;

  // A box in its last two dims; of a single dim, a row.
  const plane = ([low, high]) =>
    low.length > 1 ? [low.slice(-2), high.slice(-2)] : [[0, low[0]], [1, high[0]]];
  const wholeOf = (shape) => [shape.map(() => 0), shape];

  const text = ([low, high]) => low.map((at, dim) => `[${at},${high[dim]})`).join("\u00d7");

  // How large a cell is drawn so that the tensor and what a box has beyond it find room.
  function scaleOf(rect, shape) {
    const [low, high] = plane(rect);
    const [, sizes] = plane(wholeOf(shape));
    const beyond = Math.max(0, ...low.map((at) => -at), ...high.map((at, dim) => at - sizes[dim]));
    return { beyond, cell: (SIDE - 2 * PADDING) / (Math.max(...sizes) + 2 * beyond) };
  }

  // From a box in cells to one in pixels.
  function placing({ beyond, cell }) {
    const at = (value) => PADDING + (value + beyond) * cell;
    return (rect) => {
      const [[top, left], [bottom, right]] = plane(rect);
      return [at(left), at(top), (right - left) * cell, (bottom - top) * cell];
    };
  }

  function drawGrid(context, box, shape, cell) {
    const [, [rows, columns]] = plane(wholeOf(shape));
    context.strokeStyle = plain("grid");
    const [x, y, width, height] = box;
    if (cell > 3) {
      for (let row = 0; row <= rows; row += 1) context.strokeRect(x, y + row * cell, width, 0);
      for (let column = 0; column <= columns; column += 1) context.strokeRect(x + column * cell, y, 0, height);
    }
    context.strokeStyle = plain("faint");
    context.strokeRect(...box);
  }

  // What a level reads: its own cell, the halo around it, and padding where the wish reaches past the border.
  function drawRead(canvas, level) {
    const context = prepared(canvas, SIDE, SIDE);
    const scale = scaleOf(level.wanted, level.read_shape);
    const box = placing(scale);
    const everything = box(wholeOf(level.read_shape));
    context.fillStyle = of("padding");
    context.fillRect(...box(level.wanted));
    context.fillStyle = plain("page");
    context.fillRect(...everything);
    context.fillStyle = of("halo");
    context.fillRect(...box(level.inside));
    context.save();
    context.beginPath();
    context.rect(...box(level.inside));
    context.clip();
    context.fillStyle = of("owned");
    context.fillRect(...box(level.owned));
    context.restore();
    hatch(context, ...box(level.owned));
    drawGrid(context, everything, level.read_shape, scale.cell);
    context.strokeStyle = plain("ink");
    context.strokeRect(...box(level.wanted));
  }

  function drawMade(canvas, level) {
    const context = prepared(canvas, SIDE, SIDE);
    const scale = scaleOf(level.made, level.made_shape);
    const box = placing(scale);
    context.fillStyle = of("made");
    context.fillRect(...box(level.made));
    drawGrid(context, box(wholeOf(level.made_shape)), level.made_shape, scale.cell);
    context.strokeStyle = plain("ink");
    context.strokeRect(...box(level.made));
  }

  function picture(level, draw, ...caption) {
    const canvas = element("canvas");
    draw(canvas, level);
    return element("figure", "", canvas, element("figcaption", "", ...caption));
  }

  // One op of the tile: what it reads on the left, what it makes of it on the right.
  function levelBox(state, level) {
    const halo = level.halo ? `${whole(level.halo)} cells of halo` : "no halo";
    const macs = level.macs ? `${count(level.macs)} MACs` : "";
    const here = level.op === state.model.opAt(state.cursor);
    return element(
      "div",
      here ? "level here" : "level",
      element("h3", "", state.model.opName(level.op)),
      picture(level, drawRead, `reads ${text(level.wanted)}`, element("br"), halo),
      picture(level, drawMade, `makes ${text(level.made)}`, element("br"), macs),
    );
  }

  function picker(tiles, chosen, choose) {
    const grid = element("div", "picker");
    grid.style.gridTemplateColumns = `repeat(${tiles.grid.at(-1)}, 26px)`;
    tiles.tiles.forEach((tile, index) => {
      const cell = button(tile.at.join(","), () => choose(index), index === chosen ? "tile chosen" : "tile");
      if (tile.at.length === 2) Object.assign(cell.style, { gridRow: tile.at[0] + 1, gridColumn: tile.at[1] + 1 });
      grid.append(cell);
    });
    return grid;
  }

  function cost(tiles, tile) {
    const macs = tile.forward.reduce((sum, level) => sum + (level.macs ?? 0), 0);
    const ratio = tiles.untiled_macs ? ` (${(tiles.macs / tiles.untiled_macs).toFixed(2)} x)` : "";
    return element(
      "p",
      "",
      `This tile: ${whole(macs)} forward MACs. All ${whole(tiles.tiles.length)} tiles: ${whole(tiles.macs)} `,
      `against ${whole(tiles.untiled_macs)} untiled${ratio}; ${whole(tiles.writes)} writes for ${whole(tiles.cells)} cells.`,
    );
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

  function mount(state) {
    const { tiles } = state.model.raw;
    let [chosen, half] = [0, "forward"];
    const root = element("section", "view");
    root.id = "tiles";
    const paint = () => {
      const tile = tiles.tiles[chosen];
      const halves = ["forward", "backward"].map((name) =>
        button(name, () => { half = name; paint(); }, name === half ? "tab chosen" : "tab"));
      const choose = (index) => { chosen = index; paint(); };
      const strip = element("div", "levels", ...tile[half].map((level) => levelBox(state, level)));
      root.replaceChildren(
        element("div", "heading", element("h2", "", `Tile ${tile.at.join(",")} level by level`), ...halves, legend()),
        element("div", "tiling", picker(tiles, chosen, choose), strip),
        cost(tiles, tile),
      );
    };
    state.onChange((what) => what === "cursor" && paint());
    paint();
    return root;
  }

  return { mount };
})();
