// A strip: a view along the time axis. All strips have the same margins, show the same steps and one cursor.
stow.strip = (() => {
  "use strict";

  const { plain } = stow.palette;
  const NARROW = 600;
  const CLICK = 4; // pixels a pointer may move and still have clicked

  const element = (tag, classes, ...children) => {
    const made = document.createElement(tag);
    if (classes) made.className = classes;
    made.append(...children);
    return made;
  };

  // A part of the page that scrolls by itself, which the keyboard has to reach and a screen reader to name.
  function scrolling(classes, label, ...children) {
    const made = element("div", classes, ...children);
    made.tabIndex = 0;
    made.setAttribute("role", "region");
    made.setAttribute("aria-label", label);
    return made;
  }

  // A canvas whose unit is a CSS pixel, cleared. It is sized anew only if it must be, for that is slow.
  function prepared(canvas, width, height) {
    const scale = window.devicePixelRatio || 1;
    const [columns, rows] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== columns || canvas.height !== rows) {
      Object.assign(canvas, { width: columns, height: rows });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.globalAlpha = 1;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  class Strip {
    #canvas = element("canvas", "ground");
    #overlay = element("canvas", "overlay");
    #from = null;

    // `draw(context, strip)` paints the view; `click(step, x, y)` answers a click.
    constructor(state, { name, title, height, draw, click = () => {} }) {
      Object.assign(this, { state, height, draw, click, name });
      this.heading = element("div", "heading", element("h2", "", title));
      this.body = element("div", "strip", this.#canvas, this.#overlay);
      this.root = element("section", "view", this.heading, this.body);
      this.root.id = name;
      this.#canvas.setAttribute("role", "img");
      this.#canvas.setAttribute("aria-label", title);
      this.#overlay.setAttribute("aria-hidden", "true");
      this.#listen();
    }

    #listen() {
      const overlay = this.#overlay;
      overlay.addEventListener("pointermove", (event) => this.#move(event));
      overlay.addEventListener("pointerdown", (event) => this.#down(event));
      overlay.addEventListener("pointerup", (event) => this.#up(event));
      overlay.addEventListener("pointerleave", () => this.#leave());
      overlay.addEventListener("dblclick", () => this.state.showAll());
      overlay.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
      new ResizeObserver(() => this.paint()).observe(this.body);
      this.state.onChange((what) => (what === "cursor" ? this.paintCursor() : this.paint()));
    }

    get narrow() {
      return this.width < NARROW;
    }

    get left() {
      return this.narrow ? 84 : 196;
    }

    // Half of the axis' last label is drawn here.
    get right() {
      return 18;
    }

    get plotWidth() {
      return Math.max(1, this.width - this.left - this.right);
    }

    x(step) {
      const [low, high] = this.state.extent;
      return this.left + ((this.state.at(step) - low) / (high - low)) * this.plotWidth;
    }

    stepAt(x) {
      const [low, high] = this.state.extent;
      return this.state.stepAt(low + ((x - this.left) / this.plotWidth) * (high - low));
    }

    #point(event) {
      const box = this.#overlay.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    #move(event) {
      const [x] = this.#point(event);
      this.state.hover(this.stepAt(x));
      if (this.#from !== null) this.paintCursor(x);
    }

    #down(event) {
      [this.#from] = this.#point(event);
    }

    #up(event) {
      const [x, y] = this.#point(event);
      const from = this.#from;
      this.#from = null;
      if (from === null) return;
      if (Math.abs(x - from) > CLICK) {
        this.state.show(this.stepAt(Math.min(x, from)), this.stepAt(Math.max(x, from)) + 1);
      } else {
        this.state.pin(this.stepAt(x));
        this.click(this.stepAt(x), x, y);
      }
    }

    // With ctrl or alt, the wheel brings steps closer around the pointer.
    #wheel(event) {
      if (!event.ctrlKey && !event.altKey) return;
      event.preventDefault();
      const [low, high] = this.state.range;
      const at = this.stepAt(this.#point(event)[0]);
      const factor = event.deltaY < 0 ? 0.7 : 1 / 0.7;
      this.state.show(at - (at - low) * factor, at + (high - at) * factor);
    }

    #leave() {
      this.#from = null;
      this.state.hover(null);
    }

    paint() {
      this.width = this.body.clientWidth;
      if (!this.width) return;
      this.draw(prepared(this.#canvas, this.width, this.height), this);
      this.paintCursor();
    }

    // The cursor over its step, and while the pointer drags, the steps it has passed over.
    paintCursor(dragged = null) {
      if (!this.width) return;
      const context = prepared(this.#overlay, this.width, this.height);
      if (dragged !== null && this.#from !== null) {
        context.fillStyle = plain("drag");
        context.fillRect(Math.min(dragged, this.#from), 0, Math.abs(dragged - this.#from), this.height);
      }
      const begin = this.x(this.state.cursor);
      const width = this.x(this.state.cursor + 1) - begin;
      if (begin + width < this.left || begin > this.left + this.plotWidth) return;
      context.fillStyle = plain("cursor");
      context.fillRect(begin + width / 2 - 1, 0, 2, this.height);
      context.globalAlpha = 0.12;
      context.fillRect(begin, 0, Math.max(2, width), this.height);
    }
  }

  return { Strip, element, prepared, scrolling };
})();
