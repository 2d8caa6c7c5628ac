// Refuses messages of a kernel that has another version of the package. Script and kernel of one wheel
// need no further check: Python has one type for each message, from which `protocol.ts` is made.
import { VERSION, type ToBrowser } from "./protocol";

export class ProtocolError extends Error {
  override name = "ProtocolError";
}

export function checkVersion(header: unknown): ToBrowser {
  const message = header as ToBrowser;
  if ("version" in message && message.version !== VERSION) {
    throw new ProtocolError(
      `The kernel speaks version ${String(message.version)} of the protocol and this view version ` +
        `${VERSION}: restart the kernel, reload the page and run the cell again.`,
    );
  }
  return message;
}
