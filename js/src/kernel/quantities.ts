// The names of the quantities measured at a site, in the order of QUANTITIES.
import { QUANTITIES, type Quantity } from "./protocol";

export const WORDS: Readonly<Record<Quantity, string>> = { output: "activation", gradient: "gradient" };

export const EACH = QUANTITIES.map((quantity, index) => ({ quantity, index, word: WORDS[quantity] }));
