// The name of a site, which selects its row; plain text where the tree has no row of it.
import { label, rowKey, type Sites } from "../kernel/sites";

interface Props {
  store: { readonly sites: { readonly value: Sites | null }; select(key: string): void };
  site: string;
  /** What is shown; by default the site's key. */
  word?: string;
  /** By default the word. */
  title?: string;
  /** The sites whose row is selected, the first that has one; by default the site itself. */
  of?: readonly string[];
}

export function SiteLink({ store, site, word = label(site), title = word, of = [site] }: Props) {
  const row = of.map((key) => rowKey(store.sites.value, key)).find((key) => key !== undefined);
  const text = <bdi>{word}</bdi>;
  if (row === undefined) return <span class="nni-site">{text}</span>;
  return (
    <button type="button" class="nni-link nni-site" title={title} onClick={() => store.select(row)}>
      {text}
    </button>
  );
}
