// The network along the time axis: a box per run, forward above and backward below, lines where data goes on.
stow.network = (() => {
  "use strict";

  const { Strip, element } = stow.strip;
  const { plain, of, hatch } = stow.palette;
  const { Raster, pixel } = stow.raster;
  const { shortened, shown } = stow.text;
  const MOST_LINES = 4000; // beyond that they are a smear
  const LANE = { most: 22, least: 3 };
  const HEIGHT = { least: 110, most: 250 };
  const MIDDLE = 18;

  // Lanes count away from the border between the halves.
  function layout(model) {
    const lanes = [0, 0];
    model.raw.runs.lane.forEach((lane, run) => {
      const half = model.raw.runs.backward[run];
      lanes[half] = Math.max(lanes[half], lane + 1);
    });
    const all = Math.max(1, lanes[0] + lanes[1]);
    const lane = Math.max(LANE.least, Math.min(LANE.most, (HEIGHT.most - MIDDLE) / all));
    const height = Math.max(HEIGHT.least, Math.ceil(all * lane + MIDDLE + 8));
    const border = Math.round((height - MIDDLE) * (lanes[0] / all));
    return { lane, height, border };
  }

  const top = (model, { lane, border }, run) => {
    const at = model.raw.runs.lane[run];
    return model.raw.runs.backward[run] ? border + MIDDLE + at * lane : border - (at + 1) * lane;
  };

  function visibleRuns(state) {
    const [low, high] = state.range;
    return [low, Math.min(high, state.model.steps)];
  }

  // Whether two runs are of one half and one doing: other lines would cross the whole picture.
  const alike = ({ raw: { runs } }, one, other) =>
    runs.backward[one] === runs.backward[other] && runs.doing[one] === runs.doing[other];

  // Lines from the run that makes a stay to those that use it.
  function drawLines(context, strip, place, stays, all) {
    const { model } = strip.state;
    const middle = (run) => top(model, place, run) + place.lane / 2;
    context.beginPath();
    for (const stay of stays) {
      const from = model.first[stay];
      if (!model.raw.stays.made[stay]) continue;
      for (const use of model.raw.stays.uses[stay]) {
        if (!all && !alike(model, from, use)) continue;
        const [x0, x1] = [strip.x(from + 0.5), strip.x(use + 0.5)];
        const bend = Math.min(24, (x1 - x0) / 2);
        context.moveTo(x0, middle(from));
        context.lineTo(x1 - bend, middle(from));
        context.quadraticCurveTo(x1 - bend / 2, middle(from), x1, middle(use));
      }
    }
    context.stroke();
  }

  function staysInSight(state) {
    const [low, high] = visibleRuns(state);
    const { model } = state;
    const found = [];
    let lines = 0;
    for (let stay = 0; stay < model.first.length && lines <= MOST_LINES; stay += 1) {
      const { uses } = model.raw.stays;
      if (model.raw.stays.made[stay] && model.first[stay] < high && (uses[stay].at(-1) ?? -1) >= low) {
        found.push(stay);
        lines += uses[stay].length;
      }
    }
    return lines <= MOST_LINES ? found : [];
  }

  function drawBoxes(context, strip, place) {
    const { model } = strip.state;
    const [low, high] = visibleRuns(strip.state);
    const height = Math.max(2, place.lane - 4);
    const width = (run) => {
      const each = strip.x(run + 1) - strip.x(run);
      return each - (each > 4 ? 2 : each > 2 ? 1 : 0);
    };
    const raster = new Raster(context, strip.left, strip.plotWidth, strip.height);
    const y = (run) => top(model, place, run) + (place.lane - height) / 2;
    for (let run = low; run < high; run += 1) {
      raster.fill(strip.x(run), y(run), width(run), height, pixel(of(model.manner(run))));
    }
    raster.paint();
    for (let run = low; run < high; run += 1) {
      const box = [strip.x(run), y(run), width(run), height];
      if (box[2] <= 3) continue;
      if (model.doing(run) === "recompute") hatch(context, ...box);
      if (box[2] > 34 && height >= 12) label(context, model, run, box);
    }
  }

  function label(context, model, run, [x, y, width, height]) {
    context.fillStyle = "#ffffff";
    const text = shown(model.raw.ops.type[model.opAt(run)]);
    context.fillText(shortened(text, Math.floor(width / 6.5)), x + 4, y + height / 2 + 0.5, width - 6);
  }

  function outline(context, strip, place, run) {
    const { model } = strip.state;
    const x = strip.x(run);
    context.strokeStyle = plain("ink");
    context.lineWidth = 2;
    context.strokeRect(x - 1, top(model, place, run), Math.max(3, strip.x(run + 1) - x), place.lane);
  }

  function drawSelected(context, strip, place) {
    const { model, selected } = strip.state;
    if (!selected) return;
    context.strokeStyle = plain("ink");
    context.lineWidth = 1.5;
    if (selected.tensor !== undefined) {
      const stays = model.staysOf[model.owner(selected.tensor)];
      drawLines(context, strip, place, stays, true);
      stays.filter((stay) => model.raw.stays.made[stay]).forEach((stay) => {
        outline(context, strip, place, model.first[stay]);
      });
    } else {
      model.runsOf[selected.op].forEach((run) => outline(context, strip, place, run));
    }
  }

  function drawHalves(context, strip, place) {
    context.fillStyle = plain("faint");
    context.textAlign = "right";
    context.fillText("forward", strip.left - 8, place.border / 2);
    const rest = strip.height - place.border - MIDDLE;
    if (rest > 14) context.fillText("backward", strip.left - 8, place.border + MIDDLE + rest / 2);
    context.textAlign = "left";
    context.fillStyle = plain("grid");
    context.fillRect(strip.left, place.border + MIDDLE / 2, strip.plotWidth, 1);
  }

  function draw(context, strip, place) {
    drawHalves(context, strip, place);
    context.save();
    context.beginPath();
    context.rect(strip.left, 0, strip.plotWidth, strip.height);
    context.clip();
    context.strokeStyle = plain("line");
    context.lineWidth = 1;
    drawLines(context, strip, place, staysInSight(strip.state), false);
    drawBoxes(context, strip, place);
    drawSelected(context, strip, place);
    context.restore();
  }

  function legend(model) {
    const names = new Set();
    for (let run = 0; run < model.steps; run += 1) {
      names.add(model.manner(run));
    }
    const keys = Array.from(names, (name) => {
      const chip = element("i", "chip");
      chip.style.background = of(name);
      return element("span", "key", chip, name);
    });
    return element("div", "legend", ...keys);
  }

  function mount(state) {
    const { model } = state;
    const place = layout(model);
    const strip = new Strip(state, {
      name: "network",
      title: "What runs",
      height: place.height,
      draw: (context, self) => draw(context, self, place),
      click: (step) => state.select({ op: model.opAt(step) }),
    });
    strip.heading.append(legend(model));
    return strip;
  }

  return { mount };
})();
