// What all views look at: the step under the cursor, the steps in sight, and what is selected.
stow.state = (() => {
  "use strict";

  const NARROWEST = 4;

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  class State {
    #listeners = [];

    constructor(model) {
      this.model = model;
      this.pinned = model.raw.curve.peak;
      this.cursor = this.pinned;
      this.range = [0, Math.max(1, model.steps)];
      this.selected = null; // { op } or { tensor }
      this.timed = false; // whether the axis counts seconds; else steps
    }

    // Call `listener` after every change, with what changed: "cursor", "range" or "selected".
    onChange(listener) {
      this.#listeners.push(listener);
    }

    #tell(what) {
      for (const listener of this.#listeners) listener(what);
    }

    // Let the axis count seconds or steps. Where nothing takes time, it counts steps.
    measureBy(timed) {
      this.timed = timed && this.model.duration > 0;
      this.#tell("range");
    }

    // Where a step begins on the axis; half a step is the middle of its time.
    at(step) {
      if (!this.timed) return step;
      const { times, steps } = this.model;
      const before = clamp(Math.floor(step), 0, steps);
      return times[before] + (step - before) * (times[Math.min(before + 1, steps)] - times[before]);
    }

    // The ends of what is in sight, on the axis.
    get extent() {
      const [low, high] = this.range.map((step) => this.at(step));
      return [low, high > low ? high : low + 1];
    }

    // The step in sight that a place on the axis belongs to.
    stepAt(place) {
      let [low, high] = [this.range[0], this.range[1] - 1];
      while (low < high) {
        const middle = Math.ceil((low + high) / 2);
        if (this.at(middle) <= place) low = middle;
        else high = middle - 1;
      }
      return low;
    }

    // Look at a step as long as the pointer is there.
    hover(step) {
      const inside = step === null ? this.pinned : clamp(step, 0, Math.max(0, this.model.steps - 1));
      if (inside === this.cursor) return;
      this.cursor = inside;
      this.#tell("cursor");
    }

    // Stay at a step.
    pin(step) {
      this.pinned = clamp(step, 0, Math.max(0, this.model.steps - 1));
      if (this.pinned < this.range[0] || this.pinned >= this.range[1]) this.#reveal(this.pinned);
      this.cursor = this.pinned;
      this.#tell("cursor");
    }

    #reveal(step) {
      const [low, high] = this.range;
      this.show(step - (high - low) / 2, step + (high - low) / 2);
    }

    // Bring the steps from `low` to before `high` in sight, as far as there are any.
    show(low, high) {
      const most = Math.max(1, this.model.steps);
      const width = clamp(Math.round(high - low), Math.min(NARROWEST, most), most);
      const begin = clamp(Math.round(low), 0, most - width);
      this.range = [begin, begin + width];
      this.#tell("range");
    }

    showAll() {
      this.show(0, this.model.steps);
    }

    select(thing) {
      this.selected = thing;
      this.#tell("selected");
    }
  }

  return { State };
})();
