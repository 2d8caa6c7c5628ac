// Run in the page by text_on_screen.py: a long text and a big attention, from the click to the frame
// that shows them, and the frames while one scrolls. The kernel answers at once: its time is not ours.
async ({ layout, state, inputs, positions, arrays, values, tries, scroll }) => {
  const reals = (n, seed) => Float64Array.from({ length: n }, (_, i) => Math.abs(Math.sin(i * 0.7 + seed)));
  let seed = 0;
  const answers = {
    show_positions: ({ id, site, example, unit, axis }) => [
      { ...positions, id, site, example, unit, axis },
      reals(positions.figures.length * positions.positions, ++seed),
    ],
    show_values: ({ id, site, part, clean }) => [{ ...arrays, request: id, site, part, clean }],
    read_values: ({ id, array, index, axes, starts, ends, most, norm_over, component }) => {
      const block = [0, 1, 2].map((k) => { let size = 1; while ((ends[k] - starts[k]) / size > most[k]) size *= 2; return size; });
      const counts = block.map((size, k) => Math.ceil((ends[k] - starts[k]) / size));
      const count = counts[0] * counts[1] * counts[2];
      const window = { array, index, axes, starts, ends, norm_over, component, block, counts };
      return [{ ...values, ...window, request: id }, new Float32Array(reals(3 * count, ++seed))];
    },
  };
  const answer = (request) => {
    const found = answers[request.type]?.(request);
    setTimeout(() => { // not within the call that asks
      if (found) stream.emit(found[0], found[1] && new DataView(found[1].buffer));
      if (request.id) control.emit({ type: "reply", id: request.id, ok: true, error: "" });
    });
  };
  const { control, stream, el, find, painted, idle, fine } = await openWidget(answer);
  for (const message of [layout, state, inputs]) stream.emit(message);
  await idle();

  /** Milliseconds from a click to the end of the frame in which a condition holds. */
  const until = async (act, holds) => {
    await idle();
    const began = performance.now();
    act();
    for (let i = 0; ; i++) {
      await painted();
      if (holds()) return performance.now() - began;
      if (i > 600) throw new Error(`nothing was painted after a click: ${el.innerText}`);
    }
  };
  const coloured = () => find("nni-words")?.querySelector("[data-at='9'][style]");
  const drawn = () => find("nni-picture")?.querySelector("canvas") && !el.querySelector(".nni-picture-wait");
  const times = { "text, from the click": [], "attention, from the click": [], "another example's text": [] };
  const part = (name) => [...find("nni-values-part").querySelectorAll("button")].find((one) => one.textContent === name);
  find("nni-tab-values").click();
  await idle();
  part("attention").click();
  await idle();
  const canvas = find("nni-picture").querySelector("canvas");
  if (canvas.toDataURL().length < 50_000) throw new Error("the attention was not painted");
  for (let i = 0; i < tries; i++) {
    find("nni-tab-overview").click();
    times["text, from the click"].push(await until(() => find("nni-tab-words").click(), coloured));
    const next = `#${(i + 1) % 2}`;
    const told = () => find("nni-words").querySelector("[data-at='0']")?.dataset.value.startsWith(next) && coloured();
    times["another example's text"].push(await until(() => find(`nni-example-${(i + 1) % 2}`).click(), told));
    find("nni-tab-overview").click();
    await idle();
    times["attention, from the click"].push(await until(() => find("nni-tab-values").click(), drawn));
  }
  fine();

  /** Seconds of scrolling by frames: the time between frames, and what the main thread did in each. */
  const scrolled = async (box) => {
    const [gaps, works] = [[], []];
    const end = performance.now() + 1000 * scroll;
    let [before, by] = [null, 24];
    while (performance.now() < end) {
      const frame = painted();
      if (box.scrollTop + by < 0 || box.scrollTop + by > box.scrollHeight - box.clientHeight) by = -by;
      requestAnimationFrame(() => { box.scrollTop += by; });
      const { start, work } = await frame;
      if (before !== null) gaps.push(start - before);
      before = start;
      works.push(work);
    }
    return [gaps, works];
  };
  const blank = document.createElement("div");
  blank.style = "position: fixed; inset: 0 0 auto; height: 340px; overflow: auto; background: #fff; z-index: 9";
  blank.append(Object.assign(document.createElement("div"), { style: "height: 1800px" }));
  document.body.append(blank);
  const [reference, referenceWork] = await scrolled(blank);
  blank.remove();
  find("nni-tab-words").click();
  await until(() => {}, coloured);
  const strip = find("nni-words");
  const last = () => strip.querySelector(`[data-at='${positions.positions - 1}']`);
  times["the rest of the text, between frames"] = [await until(() => {}, last)];
  const [gaps, works] = await scrolled(strip);
  const late = (of) => [(100 * of.filter((gap) => gap > 17.5).length) / of.length];
  times["a frame of scrolling: work"] = works;
  times["  of an empty page"] = referenceWork;
  times["between frames of scrolling"] = gaps;
  times["  of an empty page "] = reference;
  times["late frames, percent"] = late(gaps);
  times["  of an empty page  "] = late(reference);
  return times;
}
