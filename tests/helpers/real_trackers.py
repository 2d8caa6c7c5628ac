"""A watched loop writes to a real tracker, and what that has is read back by its own reader.

`python real_trackers.py KIND FOLDER`, run by `test_real_trackers` in an environment that has them.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.trackers.scalars import PassReader

STEPS, EVERY, BAD = 9, 2, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)


class Read(NamedTuple):
    """What a tracker has: by name, the steps with values; (edges, counts); texts."""

    scalars: dict[str, list[tuple[int, float]]]
    histograms: dict[str, list[tuple[int, list[float], list[float]]]]
    texts: list[str]


def tensorboard(folder: str) -> tuple[Any, Callable[[], Read]]:
    import tensorboardX
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    to = tensorboardX.SummaryWriter(folder)

    def read() -> Read:
        to.close()
        found = EventAccumulator(folder, size_guidance={"histograms": 0, "scalars": 0})
        found.Reload()
        tags = found.Tags()
        scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]}
        histograms = {
            tag: [
                (e.step, [h.min, *h.bucket_limit], list(h.bucket))
                for e in found.Histograms(tag)
                for h in [e.histogram_value]
            ]
            for tag in tags["histograms"]
        }
        texts = [
            text.decode()
            for tag in tags["tensors"]
            for e in found.Tensors(tag)
            for text in e.tensor_proto.string_val
        ]
        return Read(scalars, histograms, texts)

    return to, read


def wandb(folder: str) -> tuple[Any, Callable[[], Read]]:
    os.environ["WANDB_MODE"] = "offline"
    import wandb

    to = wandb.init(project="test", dir=folder, settings=wandb.Settings(silent=True))

    def read() -> Read:
        to.finish()
        out = Read({}, {}, [])
        for row in wandb_rows(folder):
            step = row.pop("nni/step", -1)
            assert row["_step"] >= step
            for name, value in row.items():
                if isinstance(value, str) and name.startswith("findings/"):
                    out.texts.append(value)
                elif isinstance(value, dict):
                    one = (step, value["bins"], value["values"])
                    out.histograms.setdefault(name, []).append(one)
                elif not name.startswith("_"):
                    out.scalars.setdefault(name, []).append((step, float(value)))
        return out

    return to, read


def wandb_rows(folder: str) -> Iterator[dict[str, Any]]:
    """The rows of an offline run: records in the blocks of a LevelDB log, behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = glob.glob(f"{folder}/wandb/offline*/*.wandb")
    with open(path, "rb") as file:
        data = file.read()
    at, part, block, head = 7, b"", 2**15, 7
    while at + head <= len(data):
        if block - at % block < head:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + head : at + head + size]
        at += head + size
        if kind in (1, 4):  # whole, or the last part
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                row: dict[str, Any] = {}
                for one in record.history.item:
                    *outer, last = one.nested_key or [one.key]
                    within = row.setdefault(outer[0], {}) if outer else row
                    within[last] = json.loads(one.value_json)
                yield row


def aim(folder: str) -> tuple[Any, Callable[[], Read]]:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    to = aim.Run(repo=folder)

    def points_of(sequence: Any) -> tuple[list[int], list[Any]]:
        steps, (values, *_) = sequence.data.items_list()
        return steps, values

    def read() -> Read:
        to.close()
        index = RepoIndexManager.get_index_manager(aim.Repo(folder))
        index.index(to.hash)  # as `aim up` does before it shows runs
        run, out = aim.Run(run_hash=to.hash, repo=folder, read_only=True), Read({}, {}, [])
        for name, context, _ in run.iter_metrics_info():
            if not name.startswith("__"):
                steps, values = points_of(run.get_metric(name, context))
                group, _, statistic = name.partition("/")
                site = context.to_dict().get("site")
                at = name if site is None else f"{group}/{site}/{statistic}"
                out.scalars[at] = [*zip(steps, values, strict=True)]
        for name, context, _ in run.iter_sequence_info_by_type("aim.distribution"):
            steps, values = points_of(run.get_distribution_sequence(name, context))
            out.histograms[f"{name}/{context.to_dict()['site']}/histogram"] = [
                (step, np.linspace(*one.range, one.bin_count + 1).tolist(), one.weights.tolist())
                for step, one in zip(steps, values, strict=True)
            ]
        for name, context, _ in run.iter_sequence_info_by_type("aim.text"):
            _, values = points_of(run.get_text_sequence(name, context))
            out.texts.extend(one.data for one in values)
        return out

    return to, read


def mlflow(folder: str) -> tuple[Any, Callable[[], Read]]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    mlflow.create_experiment("test", artifact_location=f"file://{folder}/files")
    mlflow.set_experiment("test")
    mlflow.start_run()

    def read() -> Read:
        client, run = mlflow.MlflowClient(), mlflow.active_run().info.run_id
        out = Read({}, {}, [])
        for name in client.get_run(run).data.metrics:
            points = client.get_metric_history(run, name)
            out.scalars[name] = [(one.step, one.value) for one in points]
        for path in glob.glob(f"{folder}/files/{run}/artifacts/findings/**/*.txt", recursive=True):
            with open(path) as file:
                out.texts.append(file.read())
        mlflow.end_run()
        return out

    return mlflow, read


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.encoder(x)))


@nnx.jit
def train_step(model: Net, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def main(kind: str, folder: str) -> None:
    to, read = {"tensorboard": tensorboard, "wandb": wandb, "aim": aim, "mlflow": mlflow}[kind](
        folder
    )
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    insp = nni.Inspector(model, X, display=False)
    losses: list[float] = []
    for step, x in enumerate(insp.watch([X] * STEPS, every=EVERY, to=to)):
        losses.append(float(train_step(model, optimizer, x)) if step != BAD else float("nan"))
        insp.metrics(loss=losses[-1])
    found, plain = read(), kind in ("tensorboard", "mlflow")
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == [*range(0, STEPS, EVERY)]
    scalars: dict[str, list[tuple[int, float]]] = {"metrics/loss": [*enumerate(losses)]}
    histograms: dict[str, list[tuple[int, list[float], list[float]]]] = {}
    reader = PassReader()

    def named(*parts: str) -> str:
        return "/".join(parts).replace("(root)", "_root_" if plain else "(root)")

    for item in passes:
        for group, site, statistic, value in reader.scalars(item):
            scalars.setdefault(named(group, site, statistic), []).append((item.step, value))
        for one in reader.histograms(item):
            edges, counts = one.edges.tolist(), one.counts.tolist()
            if kind == "tensorboard" and one.low == one.high:
                edges, counts = [one.low, one.low], [sum(counts)]
            at = named(one.group, one.site, "histogram")
            histograms.setdefault(at, []).append((item.step, edges, counts))
    cost = found.scalars.pop("nni/tracker/cpu_seconds")
    assert [step for step, _ in cost] == [one.step for one in passes[1:]]
    assert {*found.scalars} == {*scalars}, {*found.scalars} ^ {*scalars}
    for name, points in scalars.items():
        wanted = np.array(points)
        np.testing.assert_allclose(np.array(found.scalars[name]), wanted, rtol=1e-6, err_msg=name)
    if kind != "mlflow":
        assert {*found.histograms} == {*histograms}
    for name, of_each in found.histograms.items():
        for got, expected in zip(of_each, histograms[name], strict=True):
            assert got[0] == expected[0], name
            np.testing.assert_allclose(got[1], expected[1], rtol=1e-6, atol=1e-30, err_msg=name)
            np.testing.assert_array_equal(got[2], expected[2], err_msg=name)
    metrics = [text for text in found.texts if text.startswith("warning: metrics")]
    assert len(metrics) == 1, found.texts
    assert f"first at step {BAD}" in metrics[0]
    insp.close()
    print(kind, len(found.scalars), len(found.histograms), len(found.texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
