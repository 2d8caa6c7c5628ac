// Run in the page by tree_on_screen.py: the widget with a mock comm, and what its updates take.
// Messages come from Python, which knows the protocol; buffers are filled here.
async ({ layout, state, frame: header, updates, statistics: stats, quantities, spark, figures }) => {
  const { stream, el, find, painted, idle, fine } = await openWidget();
  const { sites } = layout;
  const frame = (seq) => {
    const table = new Float64Array(sites.length * (quantities * stats + figures));
    for (let i = 0; i < table.length; i++) table[i] = Math.abs(Math.sin(i * 0.7 + seq));
    for (let i = 0; i < sites.length * quantities; i++) table.fill(0, i * stats + 7, i * stats + 10);
    const sparks = new Uint8Array(sites.length * quantities * spark).map((_, i) => (i * 37 + seq * 11) % 256);
    const bytes = new Uint8Array(table.byteLength + sparks.byteLength);
    bytes.set(new Uint8Array(table.buffer));
    bytes.set(sparks, table.byteLength);
    return [{ ...header, seq, step: seq, number: seq, progress: { ...header.progress, step: seq } }, new DataView(bytes.buffer)];
  };
  const rows = () => el.querySelectorAll("[data-testid=nni-row]").length;
  await idle();

  const times = { };
  const first = frame(1);
  let began = performance.now();
  stream.emit(layout);
  stream.emit(state);
  stream.emit(...first);
  await painted();
  times.first = [performance.now() - began];
  fine();
  if (rows() < 5) throw new Error("nothing was painted");

  // the work that an update makes: from the message to the end of the frame that shows it, less
  // the wait for that frame to begin
  const updated = async (seq) => {
    const message = frame(seq);
    await idle();
    const received = performance.now();
    stream.emit(...message);
    const took = performance.now() - received;
    const { work } = await painted();
    return took + work;
  };
  if (updates === 0) return times;
  let seq = 2;
  const series = async () => { const out = []; for (let i = 0; i < updates; i++) out.push(await updated(seq++)); return out; };
  times.update = await series();
  find("nni-tree-menu").click();
  await idle();
  [...el.querySelectorAll("button")].find((one) => one.textContent.includes("Open all")).click();
  find("nni-tree-menu").click();
  await idle();
  times["update, all open"] = await series();
  find("nni-sort-gradient").click();
  await idle();
  times["update, sorted"] = await series();
  find("nni-clear").click();
  await idle();
  times.scroll = [];
  const scroller = find("nni-tree");
  for (let i = 1; i <= updates; i++) {
    await idle();
    began = performance.now();
    scroller.scrollTop = (i * 7919) % (scroller.scrollHeight - 400);
    await painted();
    times.scroll.push(performance.now() - began);
  }
  times.search = [];
  const box = find("nni-search");
  for (const text of ["p", "pa", "part3", "blocks/9/*", "f32[*,64]", ""]) {
    await idle();
    began = performance.now();
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
    await painted();
    times.search.push(performance.now() - began);
  }
  return times;
}
