"""The settings of the compiler: XLA's options, and the network for which it orders a step."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from runs import tiny_experiment

from jaxdl.core import programs
from jaxdl.core.config import ConfigError
from jaxdl.parallel import squares
from jaxdl.parallel.compiler import CompilerConfig, compiled
from jaxdl.parallel.compiler.options import ASSUMED, INSIDE_REPLICAS
from jaxdl.parallel.compiler.times import CompileTimes, in_words
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_plan

KEPT = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
AXES = {"replica": 2, "fsdp": 4}


def test_options_of_the_compiler(monkeypatch):
    assert CompilerConfig().own("gpu", AXES) == INSIDE_REPLICAS
    assert CompilerConfig().own("gpu", {"replica": 2, "fsdp": 1, "tensor": 2}) == INSIDE_REPLICAS
    assert CompilerConfig().own("cpu", AXES) == {}
    assert CompilerConfig().own("gpu", AXES | {"replica": 1}) == {}
    assert CompilerConfig().own("gpu", AXES | {"fsdp": 1}) == {}
    threshold, gathers, limit, streams = INSIDE_REPLICAS
    config = CompilerConfig(options=(f"{threshold}=5", "xla_gpu_x=True", "xla_y=1.5", "xla_z=a,b"))
    assert config.values() == {threshold: 5, "xla_gpu_x": True, "xla_y": 1.5, "xla_z": "a,b"}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x --{limit}=1")
    assert config.own("gpu", AXES) == {name: INSIDE_REPLICAS[name] for name in (gathers, streams)}
    with pytest.raises(ConfigError, match="not NAME=VALUE"):
        CompilerConfig(options=("gpu_x=1",))
    with pytest.raises(ConfigError, match="xla_gpu_x is set twice"):
        CompilerConfig(options=("xla_gpu_x=1", "xla_gpu_x=2"))


def test_programs_are_kept_by_default(tmp_path, monkeypatch):
    """In the user's cache, in a folder of the machine; without one that can be written there is none."""
    before = {name: jax.config.values[name] for name in KEPT}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(jax, "process_count", None)  # JAX, which may not have been started, is not asked.
        CompilerConfig().keep_programs()
        folder = Path(jax.config.values["jax_compilation_cache_dir"])
        assert folder.is_relative_to(tmp_path / "jaxdl/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(7)).compile()
        kept = sorted(folder.glob("*-cache"))
        assert kept
        part = folder / "part-cache"
        part.write_bytes(kept[0].read_bytes()[:-9])  # As of a process that was killed.
        CompilerConfig(cache_dir=str(tmp_path / "own")).keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")
        CompilerConfig().keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
        assert sorted(folder.glob("*-cache")) == kept
        monkeypatch.setattr(programs, "_MOST_BYTES", 1)
        CompilerConfig().keep_programs()
        assert not list(folder.glob("*-cache")), "the oldest make room"
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        CompilerConfig().keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_the_network_for_which_a_step_is_ordered():
    for gbps in (None, 0):
        with pytest.raises(ConfigError, match="network_latency_us = 5 without network_gbps"):
            CompilerConfig(network_gbps=gbps, network_latency_us=5)
    for gbps in (0, 10):
        config = CompilerConfig(network_gbps=gbps)
        with pytest.raises(ConfigError, match=rf"network_gbps={gbps}: cpu programs are not ordered for a network"):
            config.check("cpu", AXES)
        with pytest.raises(ConfigError, match=rf"network_gbps={gbps}: there is one replica"):
            config.check("gpu", AXES | {"replica": 1})
        config.check("gpu", AXES)
    links = CompilerConfig(network_gbps=10, network_latency_us=5).links("gpu", AXES)
    assert links is not None
    assert (links.replica_bytes_per_sec, links.replica_latency_sec) == (1.25e9, pytest.approx(5e-6))
    assert CompilerConfig().links("gpu", AXES) is ASSUMED
    assert CompilerConfig(network_gbps=0).links("gpu", AXES) is None
    assert CompilerConfig().links("gpu", AXES | {"replica": 1}) is CompilerConfig().links("cpu", AXES) is None


EXPERIMENT = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=1, tensor=1))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("xla_gpu_enable_latency_hiding_scheduler=true", "is an option of gpu devices, and these are cpu devices"),
        ("xla_no_such_thing=1", "xla_no_such_thing=1: XLA has no such option here"),
        ("xla_cpu_enable_fast_math=many", "xla_cpu_enable_fast_math=many: XLA says 'many' is not a valid bool value"),
    ],
)
def test_options_that_cannot_be(option, words):
    experiment = EXPERIMENT.replaced({"compiler.options": (option,)})
    with pytest.raises(ConfigError, match=words):
        compile_train_step(make_plan(experiment, jax.devices()[:2]))


def test_an_own_option_that_xla_lacks_is_left_out():
    lowered = jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((), jnp.float32))
    assert compiled(lowered, {}, {}, own={"xla_no_such_thing": 1, "xla_nor_this": 2})(1.0) == -1
    with pytest.raises(ConfigError, match="xla_nor_this=2: XLA has no such option here"):
        compiled(lowered, {"xla_nor_this": 2}, {}, own={"xla_no_such_thing": 1})


def test_times_of_compiling_and_their_words():
    times = CompileTimes()
    jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(5)).compile()
    figures = times.figures()
    assert min(figures[name] for name in ("trace_sec", "lower_sec", "compile_sec")) > 0
    assert CompileTimes().figures() == dict.fromkeys(figures, 0)
    assert in_words({"trace_sec": 3.14, "lower_sec": 0.9, "compile_sec": 16, "num_kept": 2}) == (
        "traced 3.1 s, lowered 0.9 s, compiled 16.0 s (2 read from disk)"
    )


def test_what_is_not_finite_is_seen(monkeypatch):
    arrays = [jnp.ones((3, 4), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int32)]
    arrays.append(jnp.ones((0, 4)))
    for platform in ("cpu", "default"):  # That of other devices, which run nothing here.
        monkeypatch.setattr(squares.lax, "platform_dependent", lambda x, platform=platform, **rules: rules[platform](x))
        assert squares.are_finite(arrays).tolist() == [True] * 5
        for place, bad in itertools.product(range(3), (np.nan, np.inf, -np.inf)):
            changed = [x.at[1, 2].set(bad) if number == place else x for number, x in enumerate(arrays)]
            assert squares.are_finite(changed).tolist() == [number != place for number in range(5)]
