// Unpacks bytes that Python packed into a text.

/** Gzipped bytes in base64; spaces around the text are ignored. */
export async function gunzip(text: string): Promise<Uint8Array> {
  const packed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
