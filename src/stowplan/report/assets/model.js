// A subject as the views ask for it: columns behind questions about runs, tensors and stays.
stow.model = (() => {
  "use strict";

  const { abbreviated, percent, seconds, shown, whole } = stow.text;
  const ALWAYS_THERE = new Set(["parameter", "buffer", "constant"]);

  function grouped(keys, size) {
    const groups = Array.from({ length: size }, () => []);
    keys.forEach((key, index) => groups[key].push(index));
    return groups;
  }

  // Columns in which many texts are alike come as the texts and a number per row.
  function unshared(columns) {
    for (const [name, column] of Object.entries(columns)) {
      if (column?.texts) columns[name] = column.rows.map((row) => column.texts[row]);
    }
  }

  class Model {
    #staysOf = null;
    #runsOf = null;
    #times = null;

    constructor(raw, words) {
      unshared(raw.ops);
      unshared(raw.tensors);
      this.raw = raw;
      this.words = words;
      this.steps = raw.runs.op.length;
      this.first = new Int32Array(raw.stays.first);
      this.last = new Int32Array(raw.stays.last);
      this.bytes = new Float64Array(raw.stays.bytes);
      this.held = new Set(raw.held);
    }

    // By tensor its stays, the largest first. Made when first asked for, so that the page opens without it.
    get staysOf() {
      this.#staysOf ??= grouped(this.raw.stays.tensor, this.raw.tensors.id.length);
      return this.#staysOf;
    }

    // By op its runs.
    get runsOf() {
      this.#runsOf ??= grouped(this.raw.runs.op, this.raw.ops.id.length);
      return this.#runsOf;
    }

    // By step the seconds before it, and last the seconds of all; transfers take none of the device's time. Where work
    // stands for time, it is in percent of all work.
    get times() {
      if (this.#times) return this.#times;
      this.#times = new Float64Array(this.steps + 1);
      for (let step = 0; step < this.steps; step += 1) {
        const waits = ["store", "load"].includes(this.doing(step));
        this.#times[step + 1] = this.#times[step] + (waits ? 0 : this.raw.ops.seconds?.[this.opAt(step)] ?? 0);
      }
      const all = this.#times[this.steps];
      if (this.raw.timed_by === "macs" && all) this.#times = this.#times.map((each) => (100 * each) / all);
      return this.#times;
    }

    get duration() {
      return this.times[this.steps];
    }

    viewsOf(tensor) {
      const { alias_of: bases } = this.raw.tensors;
      return bases.flatMap((base, view) => (base >= 0 && this.owner(view) === tensor ? [view] : []));
    }

    // The tensor whose memory a tensor lives in.
    owner(tensor) {
      let at = tensor;
      while (this.raw.tensors.alias_of[at] >= 0) at = this.raw.tensors.alias_of[at];
      return at;
    }

    opAt(step) {
      return this.raw.runs.op[step];
    }

    doing(step) {
      return this.words.doings[this.raw.runs.doing[step]];
    }

    // What a run's colour stands for: its phase, unless there is more to say.
    manner(step) {
      const doing = this.doing(step);
      if (doing !== "compute") return doing;
      return this.isSweep(this.opAt(step)) ? "sweep" : this.phase(this.opAt(step));
    }

    // Whether an op runs a segment tile by tile.
    isSweep(op) {
      return this.raw.ops.type[op].startsWith("stowplan.sweep");
    }

    // How a stay came to be: "compute", "recompute" or "load".
    madeBy(stay) {
      return this.doing(this.first[stay]);
    }

    // A tensor's stays in a tier outside of the device's memory.
    awayOf(tensor) {
      return this.raw.away.tensor.flatMap((owner, index) => (owner === tensor ? [index] : []));
    }

    phase(op) {
      return this.words.phases[this.raw.ops.phase[op]];
    }

    kind(tensor) {
      return this.words.kinds[this.raw.tensors.kind[tensor]];
    }

    opName(op) {
      const { id, type } = this.raw.ops;
      return shown(/^\d+$/.test(id[op]) ? `${type[op]} ${id[op]}` : id[op]);
    }

    // The module that makes it and its id, or id and name. Where those say little: what it is the gradient of, or the op that makes it.
    tensorName(tensor) {
      const { id, name, module, gradient_of: of } = this.raw.tensors;
      if (module[tensor]) return shown(`${module[tensor]} ${id[tensor]}`);
      if (name[tensor]) return shown(`${id[tensor]} ${name[tensor]}`);
      if (of[tensor] >= 0 && !id[tensor].includes(id[of[tensor]])) {
        return `gradient of ${shown(id[of[tensor]])} (${shown(id[tensor])})`;
      }
      const maker = /^\d+$/.test(id[tensor]) ? this.maker(tensor) : null;
      return maker === null ? shown(id[tensor]) : `${id[tensor]} of ${this.opName(maker)}`;
    }

    // A name of at most this many characters: a gradient is named after its tensor.
    shortName(tensor, length) {
      const { id, name, gradient_of: of } = this.raw.tensors;
      const told = of[tensor] >= 0 && !name[tensor] && !id[tensor].includes(id[of[tensor]]);
      if (told) return `\u2202${abbreviated(shown(id[of[tensor]]), length - 1)}`;
      return abbreviated(this.tensorName(tensor), length);
    }

    // The op that makes a tensor's memory, or null.
    maker(tensor) {
      const made = this.staysOf[tensor].find((stay) => this.raw.stays.made[stay]);
      return made === undefined ? null : this.opAt(this.first[made]);
    }

    // What the colour of a tensor stands for: its decision if there are any, else its kind.
    group(tensor) {
      if (!this.raw.decisions.length) return this.kind(tensor);
      return this.raw.tensors.decision[tensor] || "undecided";
    }

    // The largest stays at a step, at most `most`; the count and bytes of the others, and of those that are
    // there at every step and not used at this one.
    alive(step, most) {
      const found = { stays: [], others: { count: 0, bytes: 0 }, standing: { count: 0, bytes: 0 } };
      for (let stay = 0; stay < this.first.length; stay += 1) {
        if (this.first[stay] > step || step > this.last[stay]) continue;
        if (this.#idle(stay, step)) this.#count(found.standing, stay);
        else if (found.stays.length < most) found.stays.push(stay);
        else this.#count(found.others, stay);
      }
      return found;
    }

    #idle(stay, step) {
      const standing = ALWAYS_THERE.has(this.kind(this.raw.stays.tensor[stay]));
      return standing && !this.raw.stays.uses[stay].includes(step);
    }

    #count(sum, stay) {
      sum.count += 1;
      sum.bytes += this.bytes[stay];
    }

    // The stay of a tensor that covers a step, or the one nearest to it.
    stayAt(tensor, step) {
      const away = (stay) => Math.max(0, this.first[stay] - step, step - this.last[stay]);
      return this.staysOf[tensor].toSorted((a, b) => away(a) - away(b))[0];
    }

    // Why a stay is in memory at a step, in words that name an op.
    why(stay, step) {
      const tensor = this.raw.stays.tensor[stay];
      const uses = this.raw.stays.uses[stay];
      if (this.first[stay] === step && this.raw.stays.made[stay]) {
        return this.doing(step) === "load" ? "being loaded back" : "made by this op";
      }
      if (uses.includes(step)) return this.#usedHow(tensor, step);
      if (ALWAYS_THERE.has(this.kind(tensor))) return "always there";
      const next = uses.find((use) => use > step);
      if (next !== undefined) return this.#keptFor(stay, step, next);
      if (this.last[stay] === this.steps - 1) return "held to the end of the step";
      return `until step ${this.last[stay] + 1}`;
    }

    #usedHow(tensor, step) {
      if (this.doing(step) === "store") return "being stored";
      const made = this.raw.ops.outputs[this.opAt(step)].some((output) => this.owner(output) === tensor);
      return made ? "added to by this op" : "read by this op";
    }

    #keptFor(stay, step, next) {
      const again = { recompute: "recomputed, ", load: "loaded back, " }[this.madeBy(stay)] ?? "";
      const ahead = next - step;
      return `${again}kept for ${this.opName(this.opAt(next))} in ${whole(ahead)} ${ahead === 1 ? "step" : "steps"}`;
    }

    // Seconds of an op as the pricing means them: only ratios count where multiply-accumulates stand for time.
    time(op) {
      const all = this.raw.ops.seconds;
      if (!all || all[op] === null) return "";
      if (this.raw.timed_by !== "macs") return seconds(all[op]);
      const step = all.reduce((sum, each) => sum + (each ?? 0), 0);
      return step ? `${percent(all[op] / step)} of the baseline` : "";
    }
  }

  return { Model };
})();
