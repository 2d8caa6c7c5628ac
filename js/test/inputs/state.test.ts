import { describe, expect, it, vi } from "vitest";
import { exampleAt, InputsState, visibleText } from "../../src/inputs/state";
import type { Inputs } from "../../src/kernel/protocol";

const inputs: Inputs = {
  type: "inputs",
  version: 5,
  number: 1,
  kind: "run",
  other: "",
  example: 0,
  batch: 2,
  tokens: "tokens",
  positions: 3,
  problem: "",
  pictures: null,
  apart: [],
  examples: [
    { words: ["a", " b", "c"], label: "", prediction: "" },
    { words: ["d", "e", "f"], label: "", prediction: "" },
  ],
};

function taken(): InputsState {
  const state = new InputsState();
  state.take(inputs);
  return state;
}

describe("the words of an axis", () => {
  it("are those of the example at an axis of positions", () => {
    expect(taken().positionLabel("position", 3, 1, 0)).toBe(" b");
    expect(taken().positionLabel("key", 3, 2, 1)).toBe("f");
    expect(taken().positionLabel("position 2", 3, 0, 1)).toBe("d");
  });

  it("are missing where another length, another axis or another example would make them wrong", () => {
    expect(taken().positionLabel("position", 4, 1, 0)).toBeNull();
    expect(taken().positionLabel("feature", 3, 1, 0)).toBeNull();
    expect(taken().positionLabel("axis 1", 3, 1, 0)).toBeNull();
    expect(taken().positionLabel("position", 3, 1, -1)).toBeNull();
    expect(taken().positionLabel("position", 3, 1, 7)).toBeNull();
    expect(new InputsState().positionLabel("position", 3, 1, 0)).toBeNull();
    const none = new InputsState();
    none.take({ ...inputs, tokens: "" });
    expect(none.positionLabel("position", 3, 1, 0)).toBeNull();
  });

  it("are missing at sites that may have those of another argument", () => {
    let shown: [string, string] = ["layers[3]", "output"];
    const state = new InputsState(undefined, () => shown);
    const said = (apart: string[]) => {
      state.take({ ...inputs, apart });
      return state.positionLabel("position", 3, 1, 0);
    };
    expect(said(["other", "layers input"])).toBe(" b");
    expect(said(["layers"])).toBeNull();
    expect(said(["*"])).toBeNull();
    shown = ["layers", "input"];
    expect(said(["layers input"])).toBeNull();
    expect(said(["layers/0"])).toBe(" b");
  });

  it("are of the example in the slice, if the axis of the batch is known", () => {
    expect(exampleAt(["batch", "position"], [2, 3], [1, 0], inputs)).toBe(1);
    expect(exampleAt(["batch", "position"], [4, 3], [1, 0], inputs)).toBe(-1);
    expect(exampleAt(["position"], [3], [0], inputs)).toBe(-1);
    expect(exampleAt(["position"], [3], [0], { ...inputs, batch: 1 })).toBe(0);
  });

  it("label the units along an axis only of a batch of one", () => {
    const state = taken();
    expect(state.axisWords("key (3)")).toBeUndefined();
    state.take({ ...inputs, batch: 1 });
    expect(state.axisWords("key (3)")).toEqual(["a", " b", "c"]);
    for (const axis of ["key (4)", "feature (3)", "key", undefined]) expect(state.axisWords(axis)).toBeUndefined();
  });

  it("keep the chosen example within the batch", () => {
    const state = taken();
    state.example.value = 1;
    state.take({ ...inputs, batch: 1 });
    expect(state.example.value).toBe(0);
  });
});

describe("a word on screen", () => {
  it("shows whitespace and control characters", () => {
    expect(visibleText(" the")).toBe("·the");
    expect(visibleText("\n\t\r\0\x7f")).toBe("⏎⇥␍␀␡");
    expect(visibleText("")).toBe("∅");
    expect(visibleText("\u00a0\u200b")).toBe("⍽⍽");
  });

  it("leaves everything else as it is", () => {
    for (const word of ["<img src=x onerror=alert(1)>", "👩‍👩‍👧", "שלום", "é", "&amp;"]) expect(visibleText(word)).toBe(word.replaceAll(" ", "·"));
  });
});

it("begins with the example that was looked at, and says which one is chosen", async () => {
  vi.useFakeTimers();
  const asked: unknown[] = [];
  const state = new InputsState((request) => asked.push(request));
  state.take({ ...inputs, number: 2, batch: 8, example: 5 });
  expect(state.example.value).toBe(5);
  state.choose(2);
  state.choose(3);
  vi.runAllTimers();
  vi.useRealTimers();
  expect(asked).toEqual([{ type: "choose_example", example: 3 }]);
  state.take({ ...inputs, number: 3, batch: 8, example: 5 }); // chosen here: it stays
  expect(state.example.value).toBe(3);
});
