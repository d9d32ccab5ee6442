// Lifetimes: a row per tensor, a bar per copy. Only the rows in sight are drawn, so there may be any number.
stow.lifetimes = (() => {
  "use strict";

  const { Strip, element, scrolling } = stow.strip;
  const { plain, of, hatch } = stow.palette;
  const { bytes, whole } = stow.text;
  const ROW = 18;
  const SIZE = 56; // pixels that a figure takes in the margin
  const HEIGHT = 20 * ROW;

  // What a search looks through, for each tensor.
  function haystack(model, tensor) {
    const { id, name, shape, decision } = model.raw.tensors;
    const words = [id[tensor], name[tensor], shape[tensor], decision[tensor], model.kind(tensor)];
    for (const stay of model.staysOf[tensor]) {
      if (!model.raw.stays.made[stay]) continue;
      const op = model.opAt(model.first[stay]);
      words.push(model.raw.ops.id[op], model.raw.ops.type[op], model.raw.ops.scope[op]);
    }
    return words.join("\n").toLowerCase();
  }

  // All rows; in a plan those that are not simply kept come first.
  function ordered(model) {
    if (!model.raw.decisions.length) return model.raw.rows;
    const isKept = (tensor) => ["keep", "undecided"].includes(model.group(tensor));
    return [...model.raw.rows.filter((tensor) => !isKept(tensor)), ...model.raw.rows.filter(isKept)];
  }

  // The rows of the chosen groups (of all if none is chosen) in which every word of the search occurs.
  function matching(model, haystacks, all, groups, search) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter((tensor) => {
      if (groups.size && !groups.has(model.group(tensor))) return false;
      if (words.length) haystacks[tensor] ??= haystack(model, tensor);
      return words.every((word) => haystacks[tensor].includes(word));
    });
  }

  function drawBar(context, strip, stay, y) {
    const { model } = strip.state;
    const x = Math.max(strip.left, strip.x(model.first[stay]));
    const end = Math.min(strip.left + strip.plotWidth, strip.x(model.last[stay] + 1));
    if (end <= x) return;
    const tensor = model.raw.stays.tensor[stay];
    context.fillStyle = of(model.group(tensor));
    context.fillRect(x, y + 3, Math.max(1, end - x), ROW - 6);
    if (model.madeBy(stay) === "recompute") hatch(context, x, y + 3, end - x, ROW - 6);
    drawUses(context, strip, stay, y);
  }

  // A thin line while a tensor waits in a tier.
  function drawAway(context, strip, away, y) {
    const { first, last } = strip.state.model.raw.away;
    const x = Math.max(strip.left, strip.x(first[away]));
    const end = Math.min(strip.left + strip.plotWidth, strip.x(last[away] + 1));
    context.fillStyle = of("offload");
    if (end > x) context.fillRect(x, y + ROW / 2 - 1, end - x, 2);
  }

  // A mark at every run that uses the stay.
  function drawUses(context, strip, stay, y) {
    const [low, high] = strip.state.range;
    if (strip.plotWidth / (high - low) < 3) return;
    context.fillStyle = plain("ink");
    for (const use of strip.state.model.raw.stays.uses[stay]) {
      if (use >= low && use < high) context.fillRect(strip.x(use + 0.5) - 1, y + ROW / 2 - 1.5, 3, 3);
    }
  }

  function drawRow(context, strip, tensor, y) {
    const { model, selected } = strip.state;
    if (selected && model.owner(selected.tensor ?? -1) === tensor) {
      context.fillStyle = plain("drag");
      context.fillRect(0, y, strip.width, ROW);
    }
    for (const away of model.awayOf(tensor)) drawAway(context, strip, away, y);
    for (const stay of model.staysOf[tensor]) drawBar(context, strip, stay, y);
    drawName(context, strip, tensor, y + ROW / 2);
  }

  // Name and size in the margin; a narrow one has room for the name alone.
  function drawName(context, strip, tensor, y) {
    const { model } = strip.state;
    const size = strip.narrow ? 0 : SIZE;
    const width = strip.left - size - 10;
    context.fillStyle = plain("ink");
    context.fillText(model.shortName(tensor, Math.floor(width / 5.8)), 2, y, width);
    if (!size) return;
    context.textAlign = "right";
    context.fillStyle = plain("faint");
    context.fillText(bytes(model.bytes[model.staysOf[tensor][0]]), strip.left - 6, y);
    context.textAlign = "left";
  }

  // A key for each group, which shows its rows alone when it is pressed.
  function legend(model, all, groups, changed) {
    const keys = Array.from(new Set(all.map((tensor) => model.group(tensor))), (group) => {
      const chip = element("i", "chip");
      chip.style.background = of(group);
      const key = element("button", "key", chip, group === "undecided" ? "nothing to decide" : group);
      key.type = "button";
      key.title = "show these alone";
      key.setAttribute("aria-pressed", "false");
      key.addEventListener("click", () => {
        if (!groups.delete(group)) groups.add(group);
        key.setAttribute("aria-pressed", String(groups.has(group)));
        changed();
      });
      return key;
    });
    return element("div", "legend", ...keys);
  }

  function searchBox(changed) {
    const input = element("input", "search");
    input.type = "search";
    input.placeholder = "search tensors, ops, modules";
    input.setAttribute("aria-label", "search tensors, ops, modules; Enter selects the first that is found");
    input.addEventListener("input", changed);
    return input;
  }

  function mount(state) {
    const { model } = state;
    const haystacks = [];
    const all = ordered(model);
    const groups = new Set(); // that are shown alone
    let rows = all;
    const height = Math.min(HEIGHT, Math.max(3, rows.length) * ROW);
    const filler = element("div", "filler");
    const fill = () => {
      filler.style.height = `${Math.max(height, rows.length * ROW)}px`;
    };
    const draw = (context, strip) => {
      const begin = Math.floor(strip.root.querySelector(".scroll").scrollTop / ROW);
      const offset = strip.root.querySelector(".scroll").scrollTop - begin * ROW;
      rows.slice(begin, begin + Math.ceil(height / ROW) + 1).forEach((tensor, index) => {
        drawRow(context, strip, tensor, index * ROW - offset);
      });
    };
    const click = (_, __, y) => {
      const tensor = rows[Math.floor((y + strip.root.querySelector(".scroll").scrollTop) / ROW)];
      if (tensor !== undefined) state.select({ tensor });
    };
    const title = "How long each tensor lives";
    const strip = new Strip(state, { name: "lifetimes", title, height, draw, click });
    const scroll = scrolling("scroll", title, filler);
    scroll.style.height = `${height}px`;
    strip.body.replaceWith(scroll);
    filler.append(strip.body);
    scroll.addEventListener("scroll", () => strip.paint());
    const told = element("output", "found");
    const changed = () => {
      rows = matching(model, haystacks, all, groups, input.value);
      scroll.scrollTop = 0;
      fill();
      strip.paint();
      const isPart = groups.size || input.value.trim();
      told.textContent = isPart ? `${whole(rows.length)} of ${whole(all.length)}` : "";
    };
    const input = searchBox(changed);
    input.addEventListener("keydown", ({ key }) => {
      if (key === "Enter" && rows.length) state.select({ tensor: rows[0] });
    });
    strip.heading.append(legend(model, all, groups, changed), element("div", "searching", input, told));
    fill();
    return strip;
  }

  return { mount };
})();
