// The height of a view that is docked: a pane of its own (JupyterLab's "Create New View for Output", a
// sidecar) is filled; in a cell of a notebook the view has a height of its own.

const PANES = ".jp-LinkedOutputView, .jupyterlab-sidecar";

/** Keeps a view as high as the pane that it fills, and reports whether it is in one: a pane whose tab was
 * closed may keep its views, but is not in the page. Call the returned function to end. */
export function fillPane(view: HTMLElement, setDocked: (docked: boolean) => void): () => void {
  let pane: Element | null = null;
  const fit = (): void => {
    const around = pane ?? view.closest(PANES);
    setDocked(around?.isConnected ?? false);
    if (!around) return;
    if (!pane) {
      pane = around;
      observer.observe(around); // a host attaches the view after it has rendered it
    }
    const above = view.getBoundingClientRect().top - around.getBoundingClientRect().top + around.scrollTop;
    view.style.setProperty("--nni-height", `${Math.max(around.clientHeight - Math.max(above, 0) - 8, 320)}px`);
  };
  const observer = new ResizeObserver(fit);
  observer.observe(view);
  fit();
  return () => observer.disconnect();
}
