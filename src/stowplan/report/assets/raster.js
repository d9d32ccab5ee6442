// Many small rectangles at once: filled into an image by rows, some ten times faster than canvas calls.
stow.raster = (() => {
  "use strict";

  // A colour of the style sheet, "#rrggbb", as a pixel of an image.
  function pixel(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }

  class Raster {
    // An image over the part of a context that begins at `left` and is `width` by `height` CSS pixels.
    constructor(context, left, width, height) {
      this.scale = window.devicePixelRatio || 1;
      this.context = context;
      this.left = left;
      this.columns = Math.max(1, Math.round(width * this.scale));
      this.rows = Math.max(1, Math.round(height * this.scale));
      this.pixels = new Uint32Array(this.columns * this.rows);
    }

    // A rectangle in CSS pixels of the context; anything that is there at all takes a pixel.
    fill(x, y, width, height, value) {
      const begin = Math.max(0, Math.round((x - this.left) * this.scale));
      const end = Math.min(this.columns, Math.max(begin + 1, Math.round((x + width - this.left) * this.scale)));
      const top = Math.max(0, Math.round(y * this.scale));
      const bottom = Math.min(this.rows, Math.max(top + 1, Math.round((y + height) * this.scale)));
      if (x + width < this.left || end <= begin) return;
      for (let row = top; row < bottom; row += 1) {
        this.pixels.fill(value, row * this.columns + begin, row * this.columns + end);
      }
    }

    // Lay the image over what the context shows; where nothing was filled, that stays.
    paint() {
      const canvas = new OffscreenCanvas(this.columns, this.rows);
      const image = new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.columns, this.rows);
      canvas.getContext("2d").putImageData(image, 0, 0);
      this.context.drawImage(canvas, this.left, 0, this.columns / this.scale, this.rows / this.scale);
    }
  }

  return { Raster, pixel };
})();
