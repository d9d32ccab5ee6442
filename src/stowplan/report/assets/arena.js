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

  function box(strip, size, stay) {
    const { model } = strip.state;
    const x = Math.max(strip.left, strip.x(model.first[stay]));
    const end = Math.min(strip.left + strip.plotWidth, strip.x(model.last[stay] + 1));
    const offset = model.raw.stays.offset[stay];
    const top = y(strip, size, offset + model.bytes[stay]);
    return [x, top, end - x, Math.max(0.5, y(strip, size, offset) - top)];
  }

  // There may be a hundred thousand: all are filled into one image, and those that can be told apart bordered.
  function drawStays(context, strip, size, groups) {
    const raster = new Raster(context, strip.left, strip.plotWidth, strip.height);
    const bordered = [];
    for (const [group, stays] of groups) {
      const colour = pixel(of(group));
      for (const stay of stays) {
        const found = box(strip, size, stay);
        if (found[2] <= 0) continue;
        raster.fill(...found, colour);
        if (found[2] > BORDERED && found[3] > BORDERED) bordered.push(found);
      }
    }
    fillAsides(raster, strip, size);
    raster.paint();
    context.strokeStyle = plain("paper");
    for (const found of bordered) context.strokeRect(...found);
  }

  // What an allocator had from the device, behind what lies in it.
  function drawSegments(context, strip, size, segments) {
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

  function fillAsides(raster, strip, size) {
    const { model } = strip.state;
    const [low, high] = strip.state.range;
    const colour = pixel(of("workspace"));
    for (const [run, offset] of model.raw.arena.asides) {
      if (run < low || run >= high) continue;
      const [x, top] = [strip.x(run), y(strip, size, offset + model.raw.runs.aside[run])];
      raster.fill(x, top, strip.x(run + 1) - x, y(strip, size, offset) - top, colour);
    }
  }

  function drawSelected(context, strip, size) {
    const { model, selected } = strip.state;
    if (selected?.tensor === undefined) return;
    context.strokeStyle = plain("ink");
    context.lineWidth = 2;
    for (const stay of model.staysOf[model.owner(selected.tensor)]) {
      if (model.raw.stays.offset[stay] !== null) context.strokeRect(...box(strip, size, stay));
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

  function grouped(model) {
    const groups = new Map();
    model.raw.stays.offset.forEach((offset, stay) => {
      if (offset === null) return;
      const group = model.group(model.raw.stays.tensor[stay]);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(stay);
    });
    return groups;
  }

  // The stay drawn at a point, the smallest if several were.
  function stayAt(model, strip, size, step, py) {
    const address = ((strip.height - MARGIN - py) / (strip.height - 2 * MARGIN)) * size;
    const { offset } = model.raw.stays;
    for (let stay = model.first.length - 1; stay >= 0; stay -= 1) {
      const there = model.first[stay] <= step && step <= model.last[stay] && offset[stay] !== null;
      if (there && offset[stay] <= address && address < offset[stay] + model.bytes[stay]) return stay;
    }
    return null;
  }

  // An arena may need more than is alive at any time.
  function over({ raw: { arena, curve } }) {
    const most = curve.total[curve.peak];
    return arena.bytes > most ? `, ${percent(arena.bytes / most - 1)} above the peak` : "";
  }

  function source({ recorded, segments }) {
    if (segments.length) return `as recorded, in the allocator's segments (grey: reserved and not in use)`;
    return recorded ? "as recorded, untouched gaps closed" : "as packed into one arena";
  }

  function mount(state) {
    const { model } = state;
    const { arena } = model.raw;
    const size = Math.max(1, arena.bytes);
    const groups = grouped(model);
    const draw = (context, strip) => {
      drawAxis(context, strip, size);
      context.save();
      context.beginPath();
      context.rect(strip.left, 0, strip.plotWidth, strip.height);
      context.clip();
      drawSegments(context, strip, size, arena.segments);
      drawStays(context, strip, size, groups);
      drawSelected(context, strip, size);
      context.restore();
    };
    const click = (step, _, py) => {
      const stay = stayAt(model, strip, size, step, py);
      if (stay !== null) state.select({ tensor: model.raw.stays.tensor[stay] });
    };
    const title = `Where it lies: ${bytes(arena.bytes)} ${source(arena)}${over(model)}`;
    const strip = new Strip(state, { name: "arena", title, height: HEIGHT, draw, click });
    return strip;
  }

  return { mount };
})();
