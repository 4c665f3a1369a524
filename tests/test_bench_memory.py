"""`bench memory`: what is read off a program, the table and its remarks, and mistakes. Compiling is not tested here."""

import pytest

from jaxdl.core.config import ConfigError
from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.compiler.roofline import kernels, summed
from jaxdl.performance.bench import memory

HOST = """ENTRY %main (x: bf16[4,8], i: s32[]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %h = bf16[16,4,8]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %out = ((bf16[16,4,8]{2,1,0:S(5)}, bf16[4,8]{1,0}, s32[]), bf16[16,4,8]{2,1,0:S(5)}, u32[]) fusion-start\
(%h, %x, %i), kind=kCustom
  %there = bf16[16,4,8]{2,1,0:S(5)} fusion-done(%out)
  %d = bf16[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="checkpoint/rematted_computation/dot"}
  ROOT %n = bf16[4,8]{1,0} negate(%x)
}
"""


def test_copies_to_the_host_are_no_kernels_and_what_is_computed_again_is_known():
    found = {one.name: one for one in kernels(hlo.parse(HOST))}
    assert found["out"].host_bytes == 2 * 4 * 8, "the slice, and not the array on the host that it becomes a part of"
    assert found["out"].moved_bytes == 0
    assert "there" not in found
    assert [name for name, one in found.items() if one.again] == ["d"]
    assert summed(found.values())["all"]["bytes"] == sum(found[name].moved_bytes for name in ("h", "d", "n"))


LOGITS = """
%inside (p: bf16[2,6,16]) -> bf16[2,6,50] {
  %p = bf16[2,6,16]{2,1,0} parameter(0)
  %wide = f32[2,6,50]{2,1,0} broadcast(%p)
  ROOT %narrow = bf16[2,6,50]{2,1,0} convert(%wide)
}

ENTRY %main (x: bf16[2,6,16], t: f32[50,16]) -> bf16[2,6,50] {
  %x = bf16[2,6,16]{2,1,0} parameter(0)
  %t = f32[50,16]{1,0} parameter(1)
  %head = f32[16,50]{1,0} copy(%t)
  ROOT %logits = bf16[2,6,50]{2,1,0} fusion(%x), kind=kLoop, calls=%inside
}
"""


def test_logits_are_told_from_the_output_layer():
    """And from arrays inside of fusions."""
    assert memory.most_logits(hlo.parse(LOGITS), 50) == 2 * 2 * 6 * 50
    assert [memory.own_words(words, 8) for words in (400, 50)] == [50, 50]


ROW = {
    "mesh": "2 x 4", "length": 2048, "examples": 8, "kept": "offload", "bytes": 81e9, "temporary_bytes": 7e9,
    "least_sec": 0.2, "mfu": 0.614, "host_sec": 0.1, "flash_forward": 1, "flash_backward": 1, "logits_bytes": 64e6,
}  # fmt: skip


def test_a_row_and_what_is_said_below_the_table():
    assert memory.texts(ROW) == ("2 x 4", "2,048", "8", "offload", "81.0*", "7.0", "200.0", "61 %", "100")
    assert memory.texts(ROW | {"bytes": 8e9, "host_sec": 0.0})[4::4] == ("8.0", "")
    assert memory.remarks([ROW]) == [
        "* more than the 80 GB of an H100",
        "attention: cuDNN's flash kernel, forward and backward, in every row",
        "logits: at most 64 MB of a device at a time",
    ]
    other = ROW | {"bytes": 1, "flash_backward": 0, "kept": "dots", "logits_bytes": 128e6}
    assert memory.remarks([ROW, other])[1:] == [
        "attention: cuDNN's flash kernel, forward and backward, but not in 2 x 4 dots",
        "logits: at most 128 MB of a device at a time",
    ]


def test_products_are_those_of_the_row_that_computes_the_fewest():
    rows = [ROW | {"product_sec": sec, "length": length} for sec, length in ((0.12, 1), (0.1, 1), (0.16, 2))]
    memory.add_mfu(rows)
    assert [row["mfu"] for row in rows] == pytest.approx([0.5, 0.5, 0.8])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "configs/digits.py"], "model resnet: it has no setting remat"),
        (["--config", "configs/python_lm.py", "--meshes", "8"], "--meshes 8: give the devices of fsdp and of tensor"),
        (["--config", "configs/python_lm.py", "--examples", "0"], "--examples 0: give 1 or more"),
    ],
)
def test_mistakes(args, message):
    with pytest.raises(ConfigError, match=message):
        memory.main(args)
