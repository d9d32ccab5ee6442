// How figures and foreign names are written.
stow.text = (() => {
  "use strict";

  const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];

  function threeDigits(size) {
    const digits = Math.abs(size) < 10 ? 2 : Math.abs(size) < 100 ? 1 : 0;
    return size.toFixed(digits);
  }

  function scaled(count, base, units) {
    let size = count;
    let unit = 0;
    while (Math.abs(size) >= base && unit < units.length - 1) {
      size /= base;
      unit += 1;
    }
    return unit ? `${threeDigits(size)} ${units[unit]}` : `${count} ${units[0]}`.trim();
  }

  const bytes = (count) => scaled(count, 1024, BINARY);
  const count = (number) => scaled(number, 1000, DECIMAL);
  const whole = (number) => number.toLocaleString("en-US");
  const percent = (share) => `${(100 * share).toPrecision(share < 0.001 ? 1 : 3)} %`;

  // Steps between the marks of an axis, so that it says 2 GiB and not 1.86 GiB.
  const binarySteps = Array.from({ length: 62 }, (_, power) => 2 ** power);

  // The figure of a mark, without decimals that say nothing.
  const tick = (size) => bytes(size).replace(/\.0+ /, " ");

  function seconds(duration) {
    if (!duration) return "0 s";
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
      if (Math.abs(duration) >= scale) return `${threeDigits(duration / scale)} ${unit}`;
    }
    return `${threeDigits(duration * 1e9)} ns`;
  }

  // Control characters, marks that turn the writing direction, and characters without width or partner.
  const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/gu;
  const NAMED_PICTURES = 0x2400;

  function picture(char) {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(NAMED_PICTURES + code);
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  }

  // A name in which everything can be seen and nothing steers what stands around it.
  const shown = (name) => name.replace(UNSEEN, picture);

  const ELLIPSIS = "\u2026";

  // A text cut to at most `length` characters. Both ends of a name tell things apart, the far end more.
  function shortened(text, length) {
    const chars = Array.from(text);
    if (chars.length <= length) return text;
    const head = Math.ceil((length - 1) / 3);
    const tail = Math.max(0, length - 1 - head);
    return chars.slice(0, head).join("") + ELLIPSIS + chars.slice(chars.length - tail).join("");
  }

  // A path of modules with its words cut to their first letters, from the left, as far as it must be.
  function abbreviated(path, length) {
    if (/\s/.test(path)) return shortened(path, length);
    const parts = path.split(".");
    for (let at = 0; at < parts.length - 1 && parts.join(".").length > length; at += 1) {
      if (!/^\d+$/.test(parts[at])) parts[at] = Array.from(parts[at])[0] ?? "";
    }
    return shortened(parts.join("."), length);
  }

  return { bytes, tick, binarySteps, count, whole, percent, seconds, shown, shortened, abbreviated };
})();
