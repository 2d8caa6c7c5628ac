// A page of a module as NNX sees it, for the tests.
import { VERSION, type Nnx, type NnxMode, type NnxNode, type NnxVariable } from "../../src/kernel/protocol";

export function node(path: string, more: Partial<NnxNode> = {}): NnxNode {
  return {
    path, name: path.split("/").at(-1)!, type: "Linear", depth: path === "" ? 0 : 1, module: path, reference: 0, first: null, also: [],
    attributes: [], attributes_total: 0, ...more,
  }; // prettier-ignore
}

export function variable(path: string, more: Partial<NnxVariable> = {}): NnxVariable {
  return {
    path, module: path.split("/").slice(0, -1).join("/"), type: "Param", shape: "(2, 3)", dtype: "float32", bytes: 24, sharding: "cpu:0",
    held: "array", committed: false, metadata: "", value: "", reference: 0, first: null, also: [], change: null, passed: null, ...more,
  }; // prettier-ignore
}

export function mode(module: string, more: Partial<NnxMode> = {}): NnxMode {
  return {
    module, type: "Dropout", name: "deterministic", own: "False", in_force: "False", value: false, flag: true, switched: false,
    documentation: "", ...more,
  }; // prettier-ignore
}

export function page(site: string, more: Partial<Nnx> = {}): Nnx {
  const nodes = more.nodes ?? [node(site)];
  const variables = more.variables ?? [variable(`${site}/kernel`)];
  const modes = more.modes ?? [];
  return {
    type: "nnx", version: VERSION, id: 1, site, nodes, nodes_total: nodes.length, variables, variables_total: variables.length,
    kinds: [{ type: "Param", variables: 1, elements: 6, bytes: 24 }], modes, modes_total: modes.length, step: 0, since: null, passed: "",
    uncompared: "", ...more,
  }; // prettier-ignore
}
