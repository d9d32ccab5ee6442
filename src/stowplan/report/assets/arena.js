// The arena: every stay as a rectangle of time and addresses.
stow.arena = (() => {
  "use strict";

  const { Strip } = stow.strip;
  const { plain, of } = stow.palette;
  const { Raster, pixel } = stow.raster;
  const { bytes, percent } = stow.text;
  const HEIGHT = 240;
  const MARGIN = 6;
  const BORDERED = 8; // pixels: rectangles larger than this get a border

  const y = (strip, size, offset) => strip.height - MARGIN - (offset / size) * (strip.height - 2 * MARGIN);

  function box(strip, arena, stay) {
    const { model } = strip.state;
    const size = arena.bytes;
    const x = Math.max(strip.left, strip.x(model.first[stay]));
    const end = Math.min(strip.left + strip.plotWidth, strip.x(model.last[stay] + 1));
    const offset = arena.offset[stay];
    const top = y(strip, size, offset + model.bytes[stay]);
    return [x, top, end - x, Math.max(0.5, y(strip, size, offset) - top)];
  }

  // There may be a hundred thousand: all are filled into one image, and those that can be told apart bordered.
  function drawStays(context, strip, arena, groups) {
    const raster = new Raster(context, strip.left, strip.plotWidth, strip.height);
    const bordered = [];
    for (const [group, stays] of groups) {
      const colour = pixel(of(group));
      for (const stay of stays) {
        const found = box(strip, arena, stay);
        if (found[2] <= 0) continue;
        raster.fill(...found, colour);
        if (found[2] > BORDERED && found[3] > BORDERED) bordered.push(found);
      }
    }
    fillAsides(raster, strip, arena);
    raster.paint();
    context.strokeStyle = plain("paper");
    for (const found of bordered) context.strokeRect(...found);
  }

  // What an allocator had from the device, behind what lies in it.
  function drawSegments(context, strip, { bytes: size, segments }) {
    context.fillStyle = plain("grid");
    context.strokeStyle = plain("line");
    for (const [offset, length, first, last] of segments) {
      const x = Math.max(strip.left, strip.x(first));
      const end = Math.min(strip.left + strip.plotWidth, strip.x(last + 1));
      const top = y(strip, size, offset + length);
      if (end <= x) continue;
      context.fillRect(x, top, end - x, y(strip, size, offset) - top);
      context.strokeRect(x, top, end - x, y(strip, size, offset) - top);
    }
  }

  function fillAsides(raster, strip, { bytes: size, asides }) {
    const { model } = strip.state;
    const [low, high] = strip.state.range;
    const colour = pixel(of("workspace"));
    for (const [run, offset] of asides) {
      if (run < low || run >= high) continue;
      const [x, top] = [strip.x(run), y(strip, size, offset + model.raw.runs.aside[run])];
      raster.fill(x, top, strip.x(run + 1) - x, y(strip, size, offset) - top, colour);
    }
  }

  function drawSelected(context, strip, arena) {
    const { model, selected } = strip.state;
    if (selected?.tensor === undefined) return;
    context.strokeStyle = plain("ink");
    context.lineWidth = 2;
    for (const stay of model.staysOf[model.owner(selected.tensor)]) {
      if (arena.offset[stay] !== null) context.strokeRect(...box(strip, arena, stay));
    }
    context.lineWidth = 1;
  }

  function drawAxis(context, strip, size) {
    context.fillStyle = plain("faint");
    context.textAlign = "right";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const at = y(strip, size, share * size);
      const inside = Math.min(Math.max(at, 8), strip.height - 8);
      context.fillText(bytes(Math.round(share * size)), strip.left - 8, inside);
    }
    context.textAlign = "left";
    context.strokeStyle = plain("grid");
    context.strokeRect(strip.left, MARGIN, strip.plotWidth, strip.height - 2 * MARGIN);
  }

  function grouped(model, arena) {
    const groups = new Map();
    arena.offset.forEach((offset, stay) => {
      if (offset === null) return;
      const group = model.group(model.raw.stays.tensor[stay]);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(stay);
    });
    return groups;
  }

  // The stay drawn at a point, the smallest if several were.
  function stayAt(model, strip, { bytes: size, offset }, step, py) {
    const address = ((strip.height - MARGIN - py) / (strip.height - 2 * MARGIN)) * size;
    for (let stay = model.first.length - 1; stay >= 0; stay -= 1) {
      const there = model.first[stay] <= step && step <= model.last[stay] && offset[stay] !== null;
      if (there && offset[stay] <= address && address < offset[stay] + model.bytes[stay]) return stay;
    }
    return null;
  }

  // An arena may need more than is alive at any time.
  function over(arena, { raw: { curve } }) {
    const most = curve.total[curve.peak];
    return arena.bytes > most ? `, ${percent(arena.bytes / most - 1)} above the peak` : "";
  }

  function source({ recorded, segments }) {
    if (segments.length) {
      const whose = recorded ? "as recorded" : "as PyTorch's caching allocator would place it";
      return `${whose}, in the allocator's segments (grey: reserved and not in use)`;
    }
    return recorded ? "as recorded, untouched gaps closed" : "as packed into one arena";
  }

  // One arena: the first is where a run had everything, if that is recorded, the last as packed. All have one scale.
  function mount(state, raw) {
    const { model } = state;
    const arena = { ...raw, bytes: Math.max(1, ...model.raw.arenas.map((each) => each.bytes)) };
    const groups = grouped(model, arena);
    const draw = (context, strip) => {
      drawAxis(context, strip, arena.bytes);
      context.save();
      context.beginPath();
      context.rect(strip.left, 0, strip.plotWidth, strip.height);
      context.clip();
      drawSegments(context, strip, arena);
      drawStays(context, strip, arena, groups);
      drawSelected(context, strip, arena);
      context.restore();
    };
    const click = (step, _, py) => {
      const stay = stayAt(model, strip, arena, step, py);
      if (stay !== null) state.select({ tensor: model.raw.stays.tensor[stay] });
    };
    const [first] = model.raw.arenas;
    const isBeside = raw !== first;
    const where = isBeside ? "Where it could lie" : "Where it lies";
    const less = isBeside && raw.bytes < first.bytes ? `, ${percent(1 - raw.bytes / first.bytes)} less` : "";
    const title = `${where}: ${bytes(raw.bytes)} ${source(raw)}${less}${over(raw, model)}`;
    const name = isBeside ? "packed" : "arena";
    const strip = new Strip(state, { name, title, height: HEIGHT, draw, click });
    return strip;
  }

  return { mount };
})();
