"""The kernels in CUDA C++ without a GPU: NVRTC's code for them, its cache, and when they are chosen.

tests/kernels/test_kernels.py tests the bytes that they write, tests/devices/test_cuda_engine.py the engine that
launches them.
"""

import re
import sys

import pytest
import torch

from fusedcomm import env
from fusedcomm.devices import compilers
from fusedcomm.kernels import nvrtc
from fusedcomm.kernels.variants import Variant
from fusedcomm.native import _C

SCALE = Variant("scale")
VARIANTS = [
    SCALE,
    Variant("pack", "fp32", grad_dtype=torch.float16, flat=False),
    Variant("pack", "int4", 32, torch.bfloat16, False, rotated=True, stochastic=True, feedback="bf16"),
    Variant("reduce", "int8", 128, None, False, in_wire="bf16", feedback="fp32"),
    Variant("unpack", "fp16", grad_dtype=torch.float32, sums=True),
    Variant("unpack", "fp8", 128, torch.bfloat16, False, rotated=True),
]


@pytest.fixture
def has_nvrtc():
    try:
        nvrtc.check_nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.sampled(by=lambda capability, variant: {"capability": capability, "kernel": variant.kernel})
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_without_a_gpu(has_nvrtc, variant, capability):
    compiled = nvrtc.compile(variant, capability)
    assert compiled.params == tuple(_C.kernel_params(variant.kernel))
    assert compiled.cubin[:4] == b"\x7fELF" and compiled.symbol.encode() in compiled.cubin
    # Every operation is rounded once, and denormals are kept.
    assert not re.search(r"\bfma\.|\.ftz", compiled.ptx)
    assert f".target sm_{capability}" in compiled.ptx and f".maxntid {32 * compiled.num_warps}" in compiled.ptx


def test_what_has_been_compiled_is_found_again(has_nvrtc, tmp_path, monkeypatch):
    folder = str(tmp_path / "not" / "there")
    made = nvrtc.compile(SCALE, 90, folder)
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "compile_source", lambda options: pytest.fail("compiled again"))
        assert nvrtc.compile(SCALE, 90, folder).cubin == made.cubin
    assert nvrtc.compile(SCALE, 80, folder).cubin != made.cubin
    assert nvrtc.compile(SCALE, 90, "/proc/nowhere").cubin == made.cubin


def test_what_the_engine_could_not_launch_is_refused(has_nvrtc, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(nvrtc.FORMATS, torch.float32, "fp9")
        with pytest.raises(RuntimeError, match=r'NVRTC .* -DGRAD=fp9 .*:\n.*identifier "fp9" is undefined'):
            nvrtc.compile(Variant("unpack", "bf16", grad_dtype=torch.float32), 90)
    monkeypatch.setattr(_C, "kernel_params", lambda kernel: ["ptr", "i32"])
    with pytest.raises(RuntimeError, match=r"scale_kernel with the parameters .* engine passes \('ptr', 'i32'\)"):
        nvrtc.compile(SCALE, 90, str(tmp_path))
    assert not list(tmp_path.iterdir())


# ---- which kernels run


@pytest.fixture
def with_triton(monkeypatch):
    """Acts as if a supported Triton were installed. Returns the module that compiles with it."""
    from fusedcomm.kernels import compile

    monkeypatch.setattr(compile, "check_triton", lambda: "3.7.0")
    monkeypatch.delenv(env.KERNELS, raising=False)
    return compile


def test_tritons_are_taken_unless_the_user_asks_for_the_others(has_nvrtc, with_triton, monkeypatch, tmp_path):
    assert compilers.choose().name == "triton 3.7.0"
    monkeypatch.setenv(env.KERNELS, "cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = compilers.choose()
    assert chosen.name == f"cuda c++ (nvrtc {nvrtc.check_nvrtc()})"
    assert (chosen.reason, chosen.folder) == ("FUSEDCOMM_KERNELS=cuda asks for them", str(tmp_path / "fusedcomm"))
    assert chosen.compile(SCALE, 90).symbol == "scale_kernel" and len(list((tmp_path / "fusedcomm").iterdir())) == 1


@pytest.mark.parametrize("version", [None, "3.5.1", "4.0.0"])
def test_without_a_known_triton_the_others_are_taken(has_nvrtc, version, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    if version is None:
        monkeypatch.delitem(sys.modules, "fusedcomm.kernels.compile", raising=False)
        monkeypatch.delattr("fusedcomm.kernels.compile", raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
    words = "Triton cannot be imported" if version is None else f"Triton {version} is not supported: use 3.6 to 3.9"
    chosen = compilers.choose()
    assert chosen.name.startswith("cuda c++") and words in chosen.reason
    monkeypatch.setenv(env.KERNELS, "triton")
    with pytest.raises(RuntimeError, match=words):
        compilers.choose()


def test_where_there_are_neither_both_are_named(with_triton, monkeypatch):
    def unsupported():
        raise RuntimeError("Triton 4.0.0 is not supported")

    monkeypatch.setattr(with_triton, "check_triton", unsupported)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libno-such-nvrtc.so"])
    monkeypatch.setattr(nvrtc, "_library", nvrtc._library.__wrapped__)
    with pytest.raises(RuntimeError, match=r"Triton 4.0.0 is not supported\. .* NVRTC cannot be loaded \(libno-such"):
        compilers.choose()


def test_an_unknown_value_is_refused_with_those_that_there_are(monkeypatch):
    monkeypatch.setenv(env.KERNELS, "opencl")
    with pytest.raises(ValueError, match="FUSEDCOMM_KERNELS='opencl' is not possible: use 'triton' or 'cuda'"):
        compilers.choose()
