// Runs before the page's own scripts: `openWidget()` is the widget with mock comms, without a kernel, and
// the clocks that the programs beside this file share.
window.openWidget = async (answer = () => {}) => {
  const widget = (await import("/widget.js")).default;
  const model = (role) => {
    const handlers = [];
    return {
      get: (name) => ({ role, inspector: "bench", version: 1 })[name],
      on: (name, f) => name === "msg:custom" && handlers.push(f),
      send: (request) => answer(request),
      emit: (message, buffer) => handlers.forEach((f) => f(message, buffer ? [buffer] : [])),
    };
  };
  const [control, stream] = [model("control"), model("stream")];
  const signal = new AbortController().signal;
  for (const m of [stream, control]) widget.initialize({ model: m, signal });
  const el = document.createElement("div");
  document.body.append(el);
  widget.render({ model: control, el, signal });
  const find = (id) => el.querySelector(`[data-testid=${id}]`);
  // a task that is queued in a frame's callback runs once that frame has been painted
  const painted = () => new Promise((done) => requestAnimationFrame((start) => {
    const channel = new MessageChannel();
    const began = performance.now();
    channel.port1.onmessage = () => done({ start, work: performance.now() - began });
    channel.port2.postMessage(0);
  }));
  const idle = () => new Promise((done) => setTimeout(done, 120));
  const fine = () => {
    const wrong = find("nni-notice")?.textContent ?? "";
    if (wrong.trim() !== "") throw new Error(`the view says: ${wrong}`);
  };
  return { control, stream, el, find, painted, idle, fine };
};
