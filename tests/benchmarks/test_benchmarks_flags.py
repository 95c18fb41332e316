"""Flags and arguments of `python -m benchmarks`: how they are read, and which are refused."""

import pytest

from benchmarking import Bench, finish, start
from benchmarks import settings
from benchmarks.settings import FlagError


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("8192", (8192,)),
        ("8K", (8192,)),
        ("1m", (1 << 20,)),
        ("2G", (2 << 30,)),
        ("8K:64K:2x", (8192, 16384, 32768, 65536)),
        ("8K:60K:2X", (8192, 16384, 32768)),
        ("8K:24K:8K", (8192, 16384, 24576)),
        ("8K:8K:2x", (8192,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert settings.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "0", "8Q", "-8K", "1.5K", "8K:", "8K:64K", "64K:8K:2x", "8K:64K:1x", "8K:64K:0x",
     "8K:64K:0", "8K:64K:x", "8K:64K:2x:2x"],
)  # fmt: skip
def test_bad_sizes(text: str) -> None:
    with pytest.raises(FlagError, match=r"--sizes=.*: .*write it like 8"):
        settings.parse_sizes(text)


def test_meshes_and_axes() -> None:
    assert settings.parse_mesh("4x2") == (4, 2)
    assert settings.parse_axis("y,x", (4, 2)) == ("y", "x")
    with pytest.raises(FlagError, match="x, y"):
        settings.parse_axis("x,x", (4, 2))


@pytest.mark.parametrize(
    "given, told",
    [
        (("8K", "8Q", ""), "-e '8Q': it must be a whole number of bytes"),
        (("Q", "", ""), "-b 'Q': it must be a whole number of bytes"),
        (("8K", "4K", ""), "-b 8K -e 4K -f 2: -b is at most -e"),
        (("8K", "64K", "0"), "-b 8K -e 64K -f 0: "),
        (("1", "1024G", "1"), "-f a factor above 1"),
    ],
)
def test_sizes_as_nccl_tests_has_them_are_refused_by_their_own_names(
    given: tuple[str, str, str], told: str
) -> None:
    assert settings.parse_steps("8K", "32K", "2") == (8192, 16384, 32768)
    with pytest.raises(FlagError) as refused:
        settings.parse_steps(*given)
    assert told in str(refused.value) and "--sizes" not in str(refused.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--mesh=4y2",
        "--mesh=64",
        "--axis=z",
        "--dtype=flaot",
        "--collective=gather",
        "--algorithm=fastest",
        "--backend=mpi",
        "--compile_for=v5e",
        "--compile_for=v5e:9x9x9",
        "--replay=v9:4x4",
        "--sizes=1K",
        "--dtype=int4",
        "--dtype=float64",
        "--dtype=str",
        "-f=4",
        "--json=/nowhere/out.json",
        "--csv=/",
        "--plot=/nowhere/out.png",
        "--resume",
    ],
)
def test_bad_flags(flag: str, bench: Bench) -> None:
    status, out, err = bench("--compile_for=", flag)
    assert status == 2 and not out
    assert flag.strip("-").partition("=")[0] in err


def test_argument_that_is_no_flag(bench: Bench) -> None:
    status, _, err = bench("all_gather")
    assert status == 2
    assert "argument 'all_gather'" in err and "--help" in err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("certify", "all_gather"), "argument 'all_gather'"),
        (("certify", "--certificate=/nowhere/a"), "--certificate=/nowhere/a.json"),
        (("certify", "--json=a.json"), "--json: this command has no such flag"),
        (("--mesh=4x2", "--devices=4"), "--devices=4: --mesh=4x2 is one of 8"),
        (
            ("--backend=nccl",),
            "--backend=nccl: it needs NVIDIA GPUs, and JAX finds none here; where there are some, ",
        ),
        (("--backend=xla", "--replay=v5e:4x4"), "--backend=xla: only kernels can be replayed"),
        (("certify", "--out=a"), "--out: this command has no such flag"),
        (("--wire=int8", "--algorithm=line"), "--algorithm with --wire"),
        (("--wire=int8", "--nocheck"), "--check with --wire"),
        (("--replay=v5e:4x4", "--mesh=4"), "--mesh: a replay runs on no device"),
        (("--replay=v5e:4x4", "--compile_for=v5e:2x4"), "--compile_for: a replay compiles nothing"),
        (("--replay=v5e:1000x1000",), "v5e (2 torus axes, 256 chips at the most)"),
        (("--replay=v5e:0x4",), "machine 'v5e:0x4'"),
        (("--replay=v5e:4x4,v5p:4x4x4", "--axis=z"), "--axis=z: v5e:4x4 has the axes x, y"),
        (("--sizes=16G",), "--sizes with 17179869184: the interpreter takes minutes"),
        (("--sizes=1:1G:1",), "more than 256 sizes"),
        (("--sizes=",), "--sizes=: nothing is named; name it, or leave the flag out"),
        (("--collective", ""), "--collective=: nothing is named"),
        (("-b", ""), "--begin=: nothing is named"),
        (("report", "a.json", "--out="), "--out=: nothing is named"),
        (("--iters=5",), "--iters: simulated devices are not timed"),
        (("--plot=a.png",), "--plot: simulated devices have no times to plot"),
        (("experts", "--tokens=99999999"), "--tokens=99999999: it must be a whole number from 1"),
        (("fused", "--shapes=8x8x9999999"), "each must be from 1 to 1048576"),
        (("report", "a.json", "--out=a.png"), "a.json: it holds no results"),
        (("fused", "x"), "argument 'x'"),
        (("host", "x"), "argument 'x'"),
        (("host",), "devices of kind simulated"),
        (("layers",), "devices of kind simulated"),
        (("layers", "--stack=16x100x-3"), "--stack=16x100x-3: it must be LAYERSxWIDTHxTOKENS"),
        (("fused", "--fused=psum"), "--fused=psum: the products are all_gather_matmul"),
        (("fused", "--shapes=8x8"), "--shapes=8x8: it must be ROWSxKxN"),
        (("fused", "--pods=v9:4"), "--pods=v9:4"),
        (("fused", "--pods=v5e:1x4"), "one device along x"),
        (("fused", "--over=q"), "--over=q: a mesh of 3 dimensions has the axes x, y, z"),
        (("fused", "--over=x,x"), "each once"),
        (("report", "/nowhere/a.json"), "/nowhere/a.json: it holds no results"),
        (("compare", "a.json"), "compare A.json B.json"),
        (("readme", "x"), "argument 'x'"),
    ],
)
def test_commands_refuse_what_makes_no_sense(
    bench: Bench, arguments: tuple[str, ...], told: str
) -> None:
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "") and told in err


@pytest.mark.full
def test_help_is_that_of_the_command() -> None:
    done = finish(start("fused", "--help"))
    assert done.status == 0
    assert "products with their collective in one kernel" in done.out
    assert "--shapes" in done.out and "--collective" not in done.out


@pytest.mark.full
def test_each_command_says_what_its_plot_shows() -> None:
    step, sweep = (finish(start(*command, "--help")).out for command in (["step"], []))
    assert "time line as lanes" in step and "against size" not in step
    assert "time line as lanes" not in sweep and "against size" in sweep
