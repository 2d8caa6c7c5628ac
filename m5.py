import sys

sys.path.insert(0, "/tmp/wt/bench")
sys.path.insert(0, "/tmp/bx")
import time, statistics, importlib, jax, jax.numpy as jnp, numpy as np
import nnx_inspector.summarize as S

old = jax.jit(S.summarize)
shapes = ((8, 128, 128), (8, 128, 512), (8, 128, 2048))
c = time.process_time()
for s in shapes:
    jax.block_until_ready(old(jnp.ones(s)))
print("compile old", time.process_time() - c)
importlib.import_module(sys.argv[1])
new = jax.jit(lambda x: S.summarize(x))
c = time.process_time()
for s in shapes:
    jax.block_until_ready(new(jnp.ones(s)))
print("compile new", time.process_time() - c)
for s in shapes:
    x = jax.random.normal(jax.random.key(0), s)
    n = x.size
    a, b = old(x), new(x)
    assert (a.bins == b.bins).all()
    np.testing.assert_allclose(a.points, b.points, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a.std, b.std, rtol=1e-5)
    T = [[], []]
    for _ in range(50):
        for t, f in zip(T, (old, new)):
            s = time.process_time()
            jax.block_until_ready(f(x))
            t.append(time.process_time() - s)
    print(n, *(f"min {min(t) / n * 1e9:.2f} med {statistics.median(t) / n * 1e9:.2f}" for t in T))
