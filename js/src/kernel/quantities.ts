// The names of the quantities measured at a site, in the order of QUANTITIES.
import { QUANTITIES, type Quantity } from "./protocol";

export const QUANTITY_NAMES: Readonly<Record<Quantity, string>> = { output: "activation", gradient: "gradient" };

export const NAMED_QUANTITIES = QUANTITIES.map((quantity, index) => ({ quantity, index, word: QUANTITY_NAMES[quantity] }));
